// Headers and flows, against what they are to be: empty, or a line for the first difference.
#pragma once

#include <string>

namespace naive {

std::string wrong_header(unsigned seed);
std::string wrong_flow(unsigned seed);

}  // namespace naive
