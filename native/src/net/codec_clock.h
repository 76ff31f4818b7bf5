// How much CPU time slow packings have taken in this process, and how emulations prolong them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace wingbeat::net {

enum class CodecWork : std::uint8_t { pack, unpack };

// CPU time of the thread that calls.
std::uint64_t thread_cpu_ns();

class CodecClock {
 public:
  struct Total {
    std::uint64_t calls = 0;
    std::uint64_t ns = 0;
  };

  // A model with a share `scale` of the parameters, at a pace that is `stretch` times as slow. Of
  // each call, `fixed_ns` do not depend on the number of parameters.
  struct Pace {
    double stretch = 1.0;
    double scale = 1.0;
    double fixed_ns[2] = {0.0, 0.0};  // of pack and unpack
  };

  template <class Function>
  void run(CodecWork work, Function function) {
    const std::uint64_t begin = thread_cpu_ns();
    function();
    add(work, thread_cpu_ns() - begin);
  }

  Total total(CodecWork work) const;
  // From now on each call is followed by a sleep for the additional time of the whole model.
  void set_pace(const Pace& pace);

 private:
  void add(CodecWork work, std::uint64_t ns);

  std::atomic<std::uint64_t> calls_[2] = {0, 0};
  std::atomic<std::uint64_t> ns_[2] = {0, 0};
  std::mutex mutex_;
  Pace pace_;
};

// That of this process.
CodecClock& codec_clock();

}  // namespace wingbeat::net
