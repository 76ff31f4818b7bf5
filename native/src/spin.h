// When a waiting thread looks for events without sleeping.
#pragma once

#include <algorithm>
#include <chrono>

namespace wingbeat {

// Putting a thread to sleep and waking it costs about as much as looking for `time`, which pays only
// if something arrives meanwhile. After n failures in a row it is done only every 2^n-th time.
class Spin {
 public:
  // Calls `look` until it returns true or the time has passed; whether it has. Not thread-safe.
  template <class Look>
  bool run(Look look) {
    if (skip_ > 0) {
      --skip_;
      return false;
    }
    const auto end = std::chrono::steady_clock::now() + time;
    bool found = look();
    while (!found && std::chrono::steady_clock::now() < end) found = look();
    failed_ = found ? 0 : std::min(failed_ + 1, most_failed);
    skip_ = (1 << failed_) - 1;
    return found;
  }

 private:
  static constexpr std::chrono::microseconds time{30};
  static constexpr int most_failed = 6;

  int failed_ = 0;
  int skip_ = 0;  // calls until the next one that looks
};

}  // namespace wingbeat
