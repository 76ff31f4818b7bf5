// Small instances of merging, against all plans there are.
#pragma once

#include <string>

namespace naive {

// Plan the instance of that number with much, little and too little room. What is wrong with the
// plans, or nothing.
std::string wrong_merge(unsigned number);

}  // namespace naive
