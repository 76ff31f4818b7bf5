// What the driver feeds to the kernels.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "naive.h"

namespace naive {

inline constexpr std::array kinds{"normal",   "heavy",    "constant", "zeros",    "sparse", "few",
                                  "denormal", "infinite", "nan",      "any bits", "rising", "broken"};

// n elements of a kind, always the same for a seed.
Floats make(const std::string& kind, std::size_t n, unsigned seed);

}  // namespace naive
