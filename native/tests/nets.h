// Connections and lanes, over socket pairs in this process.
#pragma once

namespace nets {

// Throws std::runtime_error where something is wrong.
void check();

}  // namespace nets
