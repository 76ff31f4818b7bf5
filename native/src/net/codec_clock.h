// How much CPU time slow packings have taken in this process, and how emulations prolong them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

namespace wingbeat::net {

enum class CodecWork : std::uint8_t { pack, unpack };

// CPU time of the thread that calls.
std::uint64_t thread_cpu_ns();

class CodecClock {
 public:
  struct Total {
    std::uint64_t calls = 0;
    std::uint64_t elements = 0;
    std::uint64_t ns = 0;
  };

  // How long a call takes on the whole model: a fixed time, and one for each element.
  struct Price {
    double call_ns = 0.0;
    double element_ns = 0.0;
  };

  // Without a price a call takes its own CPU time times `factor`.
  struct Pace {
    double factor = 1.0;
    std::optional<Price> prices[2];  // of pack and unpack
  };

  template <class Function>
  void run(CodecWork work, std::size_t elements, Function function) {
    const std::uint64_t begin = thread_cpu_ns();
    function();
    add(work, elements, thread_cpu_ns() - begin);
  }

  Total total(CodecWork work) const;
  // From now on each call is followed by a sleep for the rest of its price.
  void set_pace(const Pace& pace);

 private:
  void add(CodecWork work, std::size_t elements, std::uint64_t ns);

  std::atomic<std::uint64_t> calls_[2] = {0, 0};
  std::atomic<std::uint64_t> elements_[2] = {0, 0};
  std::atomic<std::uint64_t> ns_[2] = {0, 0};
  std::mutex mutex_;
  Pace pace_;
};

// That of this process.
CodecClock& codec_clock();

}  // namespace wingbeat::net
