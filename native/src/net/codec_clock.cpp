#include "codec_clock.h"

#include <time.h>

#include <chrono>
#include <thread>

namespace wingbeat::net {

namespace {

constexpr double shortest_sleep_ns = 200'000.0;  // shorter ones overshoot, and are added up

thread_local double owed_ns = 0.0;

}  // namespace

std::uint64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void CodecClock::add(CodecWork work, std::size_t elements, std::uint64_t ns) {
  const auto index = static_cast<std::size_t>(work);
  ++calls_[index];
  elements_[index] += elements;
  ns_[index] += ns;
  {
    const std::lock_guard lock(mutex_);
    const auto spent = static_cast<double>(ns);
    const auto& price = pace_.prices[index];
    const double whole = price ? price->call_ns + price->element_ns * static_cast<double>(elements)
                               : pace_.factor * spent;
    owed_ns += whole - spent;
  }
  if (owed_ns < shortest_sleep_ns) return;
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double, std::nano>(owed_ns));
  owed_ns -= std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

CodecClock::Total CodecClock::total(CodecWork work) const {
  const auto index = static_cast<std::size_t>(work);
  return {calls_[index], elements_[index], ns_[index]};
}

void CodecClock::set_pace(const Pace& pace) {
  const std::lock_guard lock(mutex_);
  pace_ = pace;
}

CodecClock& codec_clock() {
  static CodecClock& clock = *new CodecClock;  // threads use it until the process ends
  return clock;
}

}  // namespace wingbeat::net
