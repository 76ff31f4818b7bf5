// Sends hostile frames to every port of the extension, under sanitizers: hostile FRAMES SEED.
//
// The frames are valid ones in which one thing is changed. So the program knows for each of them
// the reason for which it has to be refused, or that it is to have no effect, and compares: a
// reason that is counted once too often or too rarely is a failure. Beside them honest processes
// exchange messages, whose bytes are compared, and at the end of each part neither memory nor
// descriptors may have grown.
#include "hostile.h"

#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>

#include "net/cipher.h"

// Of the address sanitizer; not all compilers have its header.
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();
// What was freed is reused soon, so that the resident memory shows what is in use.
extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=16:malloc_context_size=3";
}

namespace hostile {

Bytes random_bytes(Random& random, std::size_t count) {
  Bytes bytes(count);
  for (auto& each : bytes) each = static_cast<std::uint8_t>(random());
  return bytes;
}

std::uint64_t other_than(std::uint64_t value, unsigned int bits, Random& random) {
  return value ^ (std::uint64_t{1} << random() % bits);
}

std::uint64_t above(std::uint64_t value, Random& random) {
  return value + 1 + (random() >> (1 + random() % 63)) % (~std::uint64_t{0} - value);
}

std::uint64_t total(const Tally& tally) {
  std::uint64_t sum = 0;
  for (const auto& [what, count] : tally) sum += count;
  return sum;
}

void send_in_pieces(int fd, const Bytes& bytes, Random& random) {
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t most = one_in(random, 8) ? 100 : 20'000;
    const std::size_t length = std::min<std::size_t>(1 + random() % most, bytes.size() - at);
    const ssize_t sent = ::send(fd, bytes.data() + at, length, MSG_NOSIGNAL);
    if (sent < 0) return;
    at += static_cast<std::size_t>(sent);
  }
}

Bytes read_to_end(int fd, bool end) {
  if (end) ::shutdown(fd, SHUT_WR);
  Bytes all;
  std::uint8_t piece[16384];
  ssize_t got = 0;
  while ((got = ::recv(fd, piece, sizeof piece, 0)) > 0) all.insert(all.end(), piece, piece + got);
  return all;
}

namespace {

std::size_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::size_t resident_mib() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages / 256;
}

struct Use {
  std::size_t allocated = __sanitizer_get_current_allocated_bytes();
  std::size_t open = descriptors();
};

// Threads of closed interfaces may still be ending, and what they have allocated counts late.
void expect_flat(const Use& before, const std::string& part) {
  constexpr std::size_t slack = 1U << 20;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    const Use now;
    if (now.allocated <= before.allocated + slack && now.open <= before.open) return;
    if (std::chrono::steady_clock::now() > deadline) {
      throw std::runtime_error(part + ": allocated bytes " + std::to_string(before.allocated) +
                               " -> " + std::to_string(now.allocated) + ", descriptors " +
                               std::to_string(before.open) + " -> " + std::to_string(now.open));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct Part {
  const char* name;
  unsigned int percent;
  std::function<Tally(std::uint64_t, Random&)> attack;
};

std::uint64_t run(const Part& part, std::uint64_t frames, Random& random) {
  const auto begin = std::chrono::steady_clock::now();
  Tally tally = part.attack(frames / 2, random);  // allocates what is kept
  const Use before;
  const std::size_t resident = resident_mib();
  for (const auto& [what, count] : part.attack(frames - frames / 2, random)) tally[what] += count;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  expect_flat(before, part.name);
  const std::size_t grown = resident_mib() - std::min(resident_mib(), resident);
  std::printf("%s: %lu hostile frames in %.1f s, resident memory +%zu MiB\n", part.name,
              static_cast<unsigned long>(total(tally)), took.count(), grown);
  for (const auto& [what, count] : tally) {
    std::printf("  %8lu  %s\n", static_cast<unsigned long>(count), what.c_str());
  }
  std::fflush(stdout);
  expect(grown <= 64, std::string(part.name) + ": resident memory grows");
  return total(tally);
}

int run_all(std::uint64_t frames, std::uint64_t seed) {
  const bool ciphers = wingbeat::net::can_encrypt();
  const auto messages = [](bool encrypted) {
    return [encrypted](std::uint64_t n, Random& r) { return attack_messages(n, encrypted, r); };
  };
  const auto collectives = [](Medium medium) {
    return [medium](std::uint64_t n, Random& r) { return attack_collectives(n, medium, r); };
  };
  const auto codecs = [](std::uint64_t n, Random& r) {  // buffers of a thread end with it
    return std::async(std::launch::async, attack_codecs, n, std::ref(r)).get();
  };
  std::vector<Part> parts{
      {"messages: handshakes of strangers", 5, attack_handshakes},
      {"messages: ports that are dialled", 2, attack_dialing},
      {"messages: a member", 25, messages(false)},
      {"collectives and groups: a rank", 20, collectives(Medium::plain)},
      {"collectives and groups: a rank, shared memory", 20, collectives(Medium::shared_memory)},
      {"shared memory: positions, flags and bytes", 5, attack_ring_memory},
      {"collectives: payloads of codecs", 5, codecs},
  };
  if (ciphers) {
    parts.push_back({"messages: a member, encrypted", 10, messages(true)});
    parts.push_back(
        {"collectives and groups: a rank, encrypted", 8, collectives(Medium::encrypted)});
  }
  Random random(seed);
  std::uint64_t sent = 0;
  for (const Part& part : parts) sent += run(part, frames * part.percent / 100 + 1, random);
  expect(!ciphers || sent >= frames, "fewer frames than asked for");
  std::printf("hostile: %lu hostile frames of seed %lu: all refused and counted, or without effect"
              "\n",
              static_cast<unsigned long>(sent), static_cast<unsigned long>(seed));
  return 0;
}

}  // namespace
}  // namespace hostile

namespace {

std::uint64_t number(const char* name, const char* text) {
  std::uint64_t found = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, found);
  if (error != std::errc() || stop != end || found == 0) {
    throw std::runtime_error(std::string(name) + "=" + text + ": allowed are whole numbers above 0");
  }
  return found;
}

}  // namespace

int main(int count, char** words) {
  try {
    return hostile::run_all(count > 1 ? number("FRAMES", words[1]) : 20'000,
                            count > 2 ? number("SEED", words[2]) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hostile: %s\n", error.what());
    return 1;
  }
}
