// Instructions for which __builtin_cpu_supports of Clang 14 has no names.
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>

namespace wingbeat {

// Bit `bit` of ECX, as the processor describes itself in a leaf.
inline bool cpuid_ecx(unsigned leaf, unsigned bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> bit & 1U) != 0;
}

// Both also need AVX, whose support by the system __builtin_cpu_supports checks.
inline bool has_f16c() { return cpuid_ecx(1, 29); }
inline bool has_vaes() { return cpuid_ecx(7, 9); }

}  // namespace wingbeat

#endif
