#ifndef XLA_PLUGIN_BASE_DENORMALS_H_
#define XLA_PLUGIN_BASE_DENORMALS_H_

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace jaxhet {

// Makes the calling thread compute with zeros for denormals, as XLA's own threads do. A thread that
// runs a part of a program must agree with them, or ranks differ in bits by who ran what.
inline void FlushDenormals() {
#ifdef __x86_64__
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  constexpr unsigned long kFlushToZero = 1UL << 24;
  unsigned long fpcr = 0;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  asm volatile("msr fpcr, %0" ::"r"(fpcr | kFlushToZero));
#endif
}

}  // namespace jaxhet

#endif  // XLA_PLUGIN_BASE_DENORMALS_H_
