// Sealed pieces: published ones, changed ones, and those out of order.
#pragma once

namespace ciphers {

// Returns the number of checks; throws std::runtime_error for the first that does not hold.
void check();

}  // namespace ciphers
