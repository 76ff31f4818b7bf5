// Targets of the fuzzer: each runs the core on one input. libfuzzer.cpp finds inputs by coverage, and
// replay.cpp runs those that were kept in tests/corpus.
//
// A target is a script: bytes of the input select what happens next, so that small changes of an input
// are small changes of a history. It aborts where a check fails; the sanitizers do the rest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace fuzz {

using Bytes = std::vector<std::uint8_t>;

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

// What is left of an input. Beyond its end all bytes are zero.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }

  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(sizeof value, left_.size());
    if (count > 0) std::memcpy(&value, left_.data(), count);
    left_ = left_.subspan(count);
    return value;
  }
  std::uint8_t byte() { return take<std::uint8_t>(); }
  bool flag() { return (byte() & 1U) != 0; }
  std::size_t below(std::size_t bound) { return take<std::uint16_t>() % bound; }

  // Mostly a small number, sometimes any.
  std::uint64_t number() {
    const std::uint8_t first = byte();
    if (first < 200) return first;
    if (first < 240) return take<std::uint16_t>();
    return take<std::uint64_t>();
  }

  // At most so many; fewer at the end.
  Bytes bytes(std::size_t most) {
    const std::size_t count = std::min(most, left_.size());
    Bytes out(left_.begin(), left_.begin() + static_cast<std::ptrdiff_t>(count));
    left_ = left_.subspan(count);
    return out;
  }

 private:
  std::span<const std::uint8_t> left_;
};

void run_headers(Input input);
void run_endpoint(Input input);
void run_carrier(Input input);
void run_connection(Input input);
void run_lane(Input input);
void run_codecs(Input input);

struct Target {
  std::string_view name;
  void (*run)(Input input);
};

inline constexpr Target targets[] = {
    {"headers", run_headers}, {"endpoint", run_endpoint}, {"carrier", run_carrier},
    {"connection", run_connection}, {"lane", run_lane}, {"codecs", run_codecs},
};

inline const Target* find_target(std::string_view name) {
  for (const Target& each : targets) {
    if (each.name == name) return &each;
  }
  return nullptr;
}

}  // namespace fuzz
