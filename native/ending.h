// What runs the interpreter from a thread that may outlive it.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace wingbeat {

// Calls a function of Python's C interface, which takes the interpreter's lock. When the interpreter
// is about to end, Python ends a daemon thread there by unwinding its stack; nanobind would take that
// for an exception and crash. So the thread waits here for the end, as Python 3.14 has it wait.
template <class Call>
auto or_wait_for_the_end(Call call) {
  try {
    return call();
  } catch (...) {  // Python is C, and throws nothing else
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Lets other threads use the interpreter while a kernel runs.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    or_wait_for_the_end([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

}  // namespace wingbeat
