#ifndef TESTS_SOFTVERBS_LIBRARY_CONTROL_H_
#define TESTS_SOFTVERBS_LIBRARY_CONTROL_H_

#include <cstddef>

// Control interface of this libibverbs. Commands are lines of words, separated by ";":
//
//   device NAME [ports=1] [mtu=5] [link=infiniband]    instead of soft0 and soft1
//   port DEVICE PORT up|down
//   gid DEVICE PORT INDEX add|remove
//   break QPN                                          the QP fails, as hardware does
//   copy VENDOR                                        by its first device (cuda, hip, host)
//   retry US                                           pause after a packet that is lost
//   jitter US [seed=1]                                 requests begin up to US later, each its own
//   error status=WC [bytes=N|all] [us=N] [WHERE] [WHEN]   this and the next two: see FaultKind
//   ghost|delay|flush|peer_flush [us=N] [WHERE] [WHEN]
//   lose|garble [memory=dmabuf] [device=NAME] [WHEN]
//   call NAME errno=N [device=NAME] [WHEN]             the entry point NAME fails
//   clear                                              forgets the faults
//   release                                            ends all pauses and delays
//   all COMMAND                                        in every process of the fabric
//
// WHERE: device=NAME port=N qpn=N opcode=N; WHEN: after=0 count=1|all, counted in matches.
// Numbers are verbs' own. Processes read SOFTVERBS_COMMANDS when they start.
extern "C" {
// Returns 0, or another number with the error of `text` in `problem`.
int softverbs_command(const char* text, char* problem, size_t size);
// "objects": those of this process that are open; "faults", "requests": how many have struck, or
// begun, so far; "qps": the numbers of the QPs. The length; `text` gets as much as there is room
// for.
size_t softverbs_query(const char* what, char* text, size_t size);
// How memory is copied that the NIC can't (a GPU's); nullptr: as the host's.
void softverbs_set_copy(void (*copy)(void* to, const void* from, size_t num_bytes));
}

#endif  // TESTS_SOFTVERBS_LIBRARY_CONTROL_H_
