// Connections that outlive their sockets.
#pragma once

namespace resumes {

// Throws std::runtime_error where something is wrong.
void check();

}  // namespace resumes
