// float16 and bfloat16, against what they are to be: empty, or a line for the first difference.
#pragma once

#include <string>

namespace naive {

std::string wrong_half(unsigned seed);

}  // namespace naive
