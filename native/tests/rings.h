#pragma once

namespace rings {

// Shared memory between two ends: bytes, doorbells, and what a broken peer stores. Throws
// std::runtime_error at the first error; returns the number of checks.
void check();

}  // namespace rings
