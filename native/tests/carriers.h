// Flows alone, and carriers over loopback with strangers and members that send anything.
#pragma once

namespace carriers {

// Throws std::runtime_error where something is wrong.
void check();

}  // namespace carriers
