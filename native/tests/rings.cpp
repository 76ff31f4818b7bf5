#include "rings.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "connections.h"
#include "net/ring.h"

namespace rings {

namespace {

using checks::copies;
using checks::expect;
using checks::socket_pair;
using namespace wingbeat::net;
using Ends = std::array<std::unique_ptr<RingStream>, 2>;

// Both ends, and the memory of the first one.
Ends connect(std::shared_ptr<Rings>* memory = nullptr) {
  const auto sockets = socket_pair();
  const auto first = std::make_shared<Rings>();
  const auto second = std::make_shared<Rings>(copies(*first));
  if (memory != nullptr) *memory = first;
  return {std::make_unique<RingStream>(sockets[0], first),
          std::make_unique<RingStream>(sockets[1], second)};
}

// Waits for the doorbell or the end of the socket, as an interface does.
class Sleeper {
 public:
  explicit Sleeper(RingStream& stream) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    stream.watch(epoll_, &stream);
  }
  ~Sleeper() { ::close(epoll_); }
  void sleep() {
    epoll_event event;
    if (::epoll_wait(epoll_, &event, 1, 20'000) != 1) throw std::runtime_error("no doorbell rang");
  }

 private:
  int epoll_;
};

std::uint8_t byte_at(std::uint64_t position) {
  return static_cast<std::uint8_t>(position * 31 + (position >> 8));
}

// Sends bytes in parts of random sizes up to `most`. Both sides sleep whenever they can.
void check_bytes(std::size_t total, std::size_t most, unsigned int seed) {
  Ends ends = connect();
  std::string error;
  std::thread writing([&] {
    try {
      Sleeper sleeper(*ends[0]);
      std::mt19937 random(seed);
      std::vector<std::uint8_t> bytes;
      for (std::size_t sent = 0; sent < total;) {
        bytes.resize(std::min<std::size_t>(1 + random() % most, total - sent));
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(sent + i);
        for (std::size_t at = 0; at < bytes.size();) {
          const std::size_t half = (bytes.size() - at) / 2;
          const iovec parts[] = {{bytes.data() + at, half},
                                 {bytes.data() + at + half, bytes.size() - at - half}};
          const ssize_t moved = ends[0]->write(parts, 2);
          if (moved < 0 && moved != -EAGAIN) throw std::runtime_error("a write failed");
          if (moved > 0) at += static_cast<std::size_t>(moved);
          if (at < bytes.size()) sleeper.sleep();
        }
        sent += bytes.size();
      }
      ends[0]->end(SHUT_WR);
    } catch (const std::exception& caught) {
      error = caught.what();
      ends[0]->end(SHUT_RDWR);
    }
  });
  std::size_t received = 0;
  bool same = true;
  try {
    Sleeper sleeper(*ends[1]);
    std::mt19937 random(seed + 1);
    std::vector<std::uint8_t> into;
    while (true) {
      into.resize(1 + random() % most);
      const iovec part = {into.data(), into.size()};
      const ssize_t moved = ends[1]->read(&part, 1);
      if (moved == 0) break;
      if (moved < 0 && moved != -EAGAIN) throw std::runtime_error("a read failed");
      for (ssize_t i = 0; i < moved; ++i) {
        same &= into[static_cast<std::size_t>(i)] == byte_at(received++);
      }
      if (moved < static_cast<ssize_t>(into.size())) sleeper.sleep();
    }
  } catch (const std::exception& caught) {
    error += caught.what();
  }
  writing.join();
  expect(error.empty(), error);
  expect(same, "bytes arrive as they were sent");
  expect(received == total, "all bytes arrive before the end");
}

// Has `act` run in another thread at the same moment as `wait` in this one, time and again.
void race(int turns, const std::function<void()>& wait, const std::function<void()>& act) {
  std::atomic<int> begun = 0;
  std::atomic<int> ended = 0;
  const auto spin = [](std::mt19937& random) {
    for (unsigned int left = random() % 500; left > 0; --left) {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  };
  std::thread other([&] {
    std::mt19937 random(1);
    for (int turn = 1; turn <= turns; ++turn) {
      while (begun < turn) {
      }
      if (begun > turns) return;
      spin(random);
      act();
      ended = turn;
    }
  });
  std::mt19937 random(2);
  std::string error;
  for (int turn = 1; turn <= turns && error.empty(); ++turn) {
    begun = turn;
    spin(random);
    try {
      wait();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    while (ended < turn) {
    }
  }
  begun = turns + 1;
  other.join();
  expect(error.empty(), error);
}

// A side that falls asleep while the other one stores what it waits for is woken. No flag is set
// before: nothing is read or written beyond what is there.
void check_wakeups(int turns) {
  std::shared_ptr<Rings> memory;
  Ends ends = connect(&memory);
  std::vector<std::uint8_t> bytes(ring_bytes);
  const iovec one = {bytes.data(), 1};
  Sleeper reading(*ends[1]);
  race(
      turns,
      [&] {
        while (ends[1]->read(&one, 1) == -EAGAIN) reading.sleep();
      },
      [&] { ends[0]->write(&one, 1); });

  RingState& state = memory->state(true);
  const iovec all = {bytes.data(), bytes.size()};
  const iovec half = {bytes.data(), bytes.size() / 2 - 1};
  ends[0]->write(&all, 1);
  Sleeper writing(*ends[0]);
  race(
      turns,
      [&] {
        while (ends[0]->write(&one, 1) == -EAGAIN) writing.sleep();
        ends[0]->write(&half, 1);
      },
      [&] {  // half of the ring at once, faster than a reader
        state.consumed = state.written - ring_bytes / 2;
        const std::uint64_t ring = 1;
        if (state.writer_sleeps.exchange(0) != 0 &&
            ::write(memory->bell(true), &ring, sizeof ring) < 0) {
          throw std::runtime_error("write");
        }
      });
}

// Whatever the other process stores, the ends access nothing outside of the ring.
void check_broken_positions() {
  std::mt19937_64 random(5);
  std::vector<std::uint8_t> bytes(3 * ring_bytes);
  const iovec part = {bytes.data(), bytes.size()};
  for (int round = 0; round < 300; ++round) {
    std::shared_ptr<Rings> memory;
    Ends ends = connect(&memory);
    const iovec some = {bytes.data(), random() % ring_bytes};
    expect(ends[0]->write(&some, 1) == static_cast<ssize_t>(some.iov_len), "there is room");
    expect(ends[1]->write(&some, 1) == static_cast<ssize_t>(some.iov_len), "there is room");
    const std::uint64_t above = some.iov_len + ring_bytes + 1 + random() % 99;
    const std::uint64_t wrong = round % 3 == 0 ? random() | std::uint64_t{1} << 63 : above;
    memory->state(true).written = wrong;
    memory->state(false).consumed = wrong;
    expect(ends[1]->read(&part, 1) == -EPROTO, "a wrong number of written bytes is refused");
    expect(ends[1]->write(&part, 1) == -EPROTO, "a wrong number of consumed bytes is refused");
    expect(ends[1]->write(&part, 1) == -EPROTO, "it stays refused");
  }
}

// A peer that writes to positions, flags and bytes all the time.
void check_random_memory() {
  std::shared_ptr<Rings> memory;
  Ends ends = connect(&memory);
  std::atomic<bool> stop = false;
  std::thread broken([&] {
    std::mt19937_64 random(9);
    while (!stop) {
      RingState& state = memory->state(random() % 2 == 0);
      const std::uint64_t value = random() % 2 == 0 ? random() : state.written + random() % 5 - 2;
      switch (random() % 4) {
        case 0: state.written = value; break;
        case 1: state.consumed = value; break;
        case 2: state.reader_sleeps = static_cast<std::uint32_t>(value); break;
        default: state.writer_sleeps = static_cast<std::uint32_t>(value);
      }
    }
  });
  std::vector<std::uint8_t> bytes(200'000);
  std::mt19937 random(11);
  for (int i = 0; i < 20'000; ++i) {
    const iovec part = {bytes.data(), random() % bytes.size()};
    const ssize_t moved = random() % 2 == 0 ? ends[1]->read(&part, 1) : ends[1]->write(&part, 1);
    if (moved > static_cast<ssize_t>(part.iov_len)) throw std::runtime_error("too many bytes");
  }
  stop = true;
  broken.join();
  ++checks::count;
}

void check_refused_memory() {
  const auto refuses = [](const std::vector<int>& descriptors) {
    try {
      const Rings rings(descriptors);
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  expect(refuses({}), "no descriptors are refused");
  expect(refuses({-1, -1, -1}), "closed descriptors are refused");
  const auto ends = socket_pair();
  expect(refuses({ends[0], ends[1], -1}), "a socket is not memory");
  const Rings good;
  struct stat found {};
  if (::fstat(good.descriptors()[0], &found) != 0) throw std::runtime_error("fstat");
  const auto unsealed = ::memfd_create("unsealed", MFD_ALLOW_SEALING);
  if (::ftruncate(unsealed, found.st_size) != 0) throw std::runtime_error("ftruncate");
  const auto with = [&](std::size_t place, int descriptor) {
    std::vector<int> own = copies(good);
    ::close(std::exchange(own[place], descriptor));
    return own;
  };
  expect(refuses(with(0, unsealed)), "memory that can shrink is refused");
  expect(refuses(with(1, ::eventfd(0, EFD_CLOEXEC))), "a doorbell that blocks is refused");
  expect(refuses(with(2, ::open("/dev/null", O_RDWR | O_NONBLOCK))), "a file is no doorbell");
  const auto pair = socket_pair();
  expect(refuses(with(1, pair[0])), "a socket is no doorbell: SIGPIPE would end the process");
  ::close(pair[1]);
  expect(!refuses(copies(good)), "memory of rings is accepted");
  expect(::ftruncate(good.descriptors()[0], 1) != 0, "memory of rings cannot shrink");
}

// A ring with few messages does not grow while it is written for the first time.
void check_memory_is_there() {
  const Rings made;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(ring_bytes / page);
  expect(::mincore(made.data(true), ring_bytes, pages.data()) == 0, "pages can be asked for");
  for (const unsigned char each : pages) expect((each & 1U) != 0, "all pages are there");
}

void check_ends() {
  std::uint8_t byte = 7;
  const iovec part = {&byte, 1};
  Ends ends = connect();
  expect(ends[1]->read(&part, 1) == -EAGAIN, "an empty ring has no bytes");
  expect(ends[0]->write(&part, 1) == 1, "there is room");
  ends[0].reset();
  expect(ends[1]->read(&part, 1) == 1, "bytes written before the end are read");
  expect(ends[1]->read(&part, 1) == 0, "then the stream ends");
}

}  // namespace

void check() {
  check_memory_is_there();
  check_ends();
  check_refused_memory();
  check_broken_positions();
  check_random_memory();
  check_bytes(30'000'000, 400'000, 1);
  check_bytes(3'000'000, 300, 2);
  check_bytes(60'000'000, 3'000'000, 3);
  check_wakeups(20'000);
}

}  // namespace rings
