#include "xla_plugin/transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "xla_plugin/base/checked.h"
#include "xla_plugin/base/error.h"

namespace jaxhet {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

SharedMemory::SharedMemory(size_t num_bytes)
    : fd_(memfd_create("jaxhet", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (!fd_) ThrowErrno("memfd_create");
  info_ = {.pid = getpid(), .fd = fd_.get(), .num_bytes = num_bytes, .nonce = {}};
  // Reserved now: running out of memory later would be a SIGBUS.
  int error_number = EINTR;
  while (error_number == EINTR) {
    error_number = posix_fallocate(fd_.get(), 0, static_cast<off_t>(kHeaderBytes + num_bytes));
  }
  if (error_number != 0) throw Error(ErrorCode::kTransport, ErrnoText("fallocate", error_number));
  if (fcntl(fd_.get(), F_ADD_SEALS, kSeals) < 0) ThrowErrno("fcntl(F_ADD_SEALS)");
  if (getrandom(&info_.nonce, sizeof info_.nonce, 0) != sizeof info_.nonce) ThrowErrno("getrandom");
  Map();
  std::memcpy(base_, &info_.nonce, sizeof info_.nonce);
}

SharedMemory::SharedMemory(const SharedMemoryInfo& info) : info_(info) {
  const std::string path = StrCat("/proc/", info.pid, "/fd/", info.fd);
  fd_.Reset(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));  // a pipe there would block
  if (!fd_) throw Error(ErrorCode::kTransport, ErrnoText(StrCat("open ", path), errno));
  struct stat status{};
  const int seals = fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd_.get(), &status) != 0 ||
      !InBounds(kHeaderBytes, info.num_bytes, static_cast<size_t>(status.st_size))) {
    Throw(ErrorCode::kTransport, path, " is not the peer's memory");
  }
  Map();
  fd_.Reset();
  if (std::memcmp(base_, &info.nonce, sizeof info.nonce) != 0) {
    munmap(base_, kHeaderBytes + info_.num_bytes);
    Throw(ErrorCode::kTransport, path, " belongs to another process (another pid namespace?)");
  }
}

SharedMemory::~SharedMemory() { munmap(base_, kHeaderBytes + info_.num_bytes); }

std::span<std::byte> SharedMemory::pages() const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {base_, RoundUp(kHeaderBytes + info_.num_bytes, page)};
}

void SharedMemory::Map() {
  void* const base = mmap(nullptr, kHeaderBytes + info_.num_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED) ThrowErrno("mmap");
  base_ = static_cast<std::byte*>(base);
}

}  // namespace jaxhet
