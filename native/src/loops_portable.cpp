#define WINGBEAT_LOOPS portable_loops
#define WINGBEAT_LOOPS_NAME "portable"
#include "loops.inc"

#include <atomic>

#include "processor.h"

namespace wingbeat {

namespace {

std::atomic<bool> portable{false};

}  // namespace

void prefer_portable(bool on) { portable.store(on); }

const Loops& loops() {
#ifdef WINGBEAT_AVX2
  static const bool avx2 = (__builtin_cpu_init(), __builtin_cpu_supports("avx2") && has_f16c());
  if (avx2 && !portable.load(std::memory_order_relaxed)) return avx2_loops;
#endif
  return portable_loops;
}

}  // namespace wingbeat
