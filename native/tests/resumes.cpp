#include "resumes.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "connections.h"
#include "net/cipher.h"
#include "net/lane.h"
#include "net/nic.h"
#include "net/resumable.h"

namespace resumes {

namespace {

using checks::Bytes;
using checks::expect;
using checks::post;
using checks::socket_pair;
using namespace wingbeat::net;

// -- The state machines alone -------------------------------------------------------------------

struct Numbered {
  std::uint64_t number = 0;
  FrameHeader header;
};

// One direction, whose socket has lost what was on its way at random times.
void check_history(unsigned seed) {
  std::mt19937 random(seed);
  SentFrames<Numbered> sent;
  ReceivedFrames received;
  std::deque<Numbered> queued, wire;
  std::deque<std::uint64_t> told;  // acknowledgements on their way
  std::uint64_t made = 0, arrived = 0, resumed = 0;
  const auto receive = [&](bool completely) {
    if (!received.in_progress()) {
      const auto begun = received.begin(wire.front().header);
      expect(begun != ReceivedFrames::Begin::wrong, "a frame that was cut comes again");
    }
    expect(wire.front().header.offset == arrived, "frames arrive in order, each once");
    if (!completely) return;
    received.end();
    ++arrived;
    wire.pop_front();
    if (received.due() || random() % 9 == 0) told.push_back(received.announce());
  };
  const auto acknowledge = [&](std::uint64_t count) {
    std::uint64_t last = 0;
    expect(sent.acknowledge(count, [&](const Numbered& each) { last = each.number; }),
           "what has arrived was sent");
    expect(last <= count, "what may not have arrived is kept");
  };
  const auto write = [&] {
    if (!sent.received(queued.front().number)) sent.keep(queued.front());
    queued.pop_front();
  };
  const auto send_again = [&] {
    const auto again = sent.take();
    queued.insert(queued.begin(), again.begin(), again.end());
  };
  for (int step = 0; step < 4000 || arrived < made; ++step) {
    const bool ends = step >= 4000;
    switch (random() % (ends ? 4 : 12)) {
      case 0:
      case 4:
      case 5:
        if (ends) break;
        queued.push_back({sent.next(), {.length = 100, .offset = made++, .total = 1U << 20}});
        break;
      case 1:
      case 6:
      case 7:
        if (queued.empty()) break;
        wire.push_back(queued.front());
        write();
        break;
      case 2:
      case 8:
      case 9:
        if (!wire.empty()) receive(random() % 4 != 0);
        break;
      case 3:
        if (told.empty()) break;
        acknowledge(told.front());
        told.pop_front();
        break;
      case 10:
        if (random() % 8 != 0) break;
        if (!wire.empty() && random() % 2 == 0) receive(false);
        wire.clear();
        told.clear();
        received.cut();
        sent.put_back(queued);
        // A socket that the other end has left since it told how much had arrived then.
        if (random() % 2 == 0) {
          acknowledge(resumed);
          send_again();
          while (!queued.empty() && random() % 4 != 0) write();
          sent.put_back(queued);
        }
        acknowledge(resumed = received.announce());
        send_again();
        expect(queued.size() == made - arrived, "all that is missing is sent, and nothing else");
        break;
      default:
        expect(!sent.acknowledge(made + 1, [](const Numbered&) {}), "no more arrives than is sent");
    }
    expect(sent.frames().size() <= made - arrived + 600, "what is kept is bounded");
  }
  acknowledge(received.announce());
  expect(sent.frames().empty(), "what has arrived is not kept");
}

void check_another_frame() {
  ReceivedFrames received;
  const FrameHeader first{.channel = 2, .tag = 3, .length = 4, .total = 8};
  expect(received.begin(first) == ReceivedFrames::Begin::fresh, "a frame begins");
  received.cut();
  expect(!received.in_progress(), "a frame that was cut is not in progress");
  FrameHeader other = first;
  other.tag = 4;
  expect(received.begin(other) == ReceivedFrames::Begin::wrong, "another frame is refused");
  other = first;
  other.consumed = 9;  // later than what was lost
  expect(received.begin(other) == ReceivedFrames::Begin::again, "the same frame goes on");
  received.end();
  expect(received.announce() == 1, "a frame that came twice counts once");
}

// -- Connections --------------------------------------------------------------------------------

// Over TCP, where the first write after the other end has closed its own succeeds.
std::array<int, 2> tcp_pair() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const where = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof address;
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  const int connecting = ::socket(AF_INET, SOCK_STREAM, 0);
  expect(::bind(listener, where, bytes) == 0 && ::listen(listener, 1) == 0 &&
             ::getsockname(listener, where, &bytes) == 0 &&
             ::connect(connecting, where, bytes) == 0,
         "a socket connects");
  const int accepted = ::accept(listener, nullptr, nullptr);
  expect(accepted >= 0, "a socket is accepted");
  ::close(listener);
  return {connecting, accepted};
}

// Ranks whose connections outlive their sockets.
class Ranks {
 public:
  Ranks(int size, bool encrypted) : encrypted_(encrypted) {
    for (int i = 0; i < size; ++i) {
      nics.push_back(std::make_shared<Nic>("lo"));
      nics.back()->start();
    }
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < i; ++j) connect(i, j, true);
    }
  }
  ~Ranks() {
    std::vector<std::thread> closing;
    for (const auto& nic : nics) closing.emplace_back([nic] { nic->close(5.0); });
    for (auto& each : closing) each.join();
    forget();
  }

  // Over a further socket, unless it is the first.
  void connect(int i, int j, bool first = false) {
    forget();
    Socket made = open();
    use(made, 0, i, j, first);
    use(made, 1, j, i, first);
  }

  // Both connect at the same time: `i` begins to use a socket that `j` has left for another one, over
  // which messages have arrived since. A further one has to follow.
  void cross(int i, int j, std::chrono::microseconds meanwhile) {
    forget();
    Socket left = open(), made = open();
    use(left, 1, j, i);
    use(made, 0, i, j);
    use(made, 1, j, i);
    std::this_thread::sleep_for(meanwhile);
    use(left, 0, i, j);
    std::this_thread::sleep_for(meanwhile);
  }

  // Ends the latest socket.
  void cut() {
    for (const int each : copies_) ::shutdown(each, SHUT_RDWR);
  }

  std::shared_ptr<Group> group(int rank, std::uint64_t id) {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < nics.size(); ++i) ranks.push_back(static_cast<int>(i));
    return std::make_shared<Group>(nics[static_cast<std::size_t>(rank)], id, ranks);
  }

  std::vector<std::shared_ptr<Nic>> nics;

 private:
  struct Socket {
    std::array<int, 2> ends;
    std::optional<Keys> keys[2];
  };

  Socket open() {
    Socket made{tcp_pair(), {}};
    const int small = 20'000;  // bytes on their way are few, so frames are cut
    for (const int end : made.ends) {
      ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
      copies_.push_back(::dup(end));
    }
    if (!encrypted_) return made;
    for (auto& each : made.keys) each.emplace();
    made.keys[0]->sending.fill(++key_);
    made.keys[1]->receiving.fill(key_);
    made.keys[1]->sending.fill(++key_);
    made.keys[0]->receiving.fill(key_);
    return made;
  }

  void use(Socket& made, std::size_t side, int own, int peer, bool first = false) {
    auto stream = std::make_unique<Stream>(made.ends[side]);
    Nic& nic = *nics[static_cast<std::size_t>(own)];
    if (first) {
      nic.add(peer, std::move(stream), made.keys[side], true);
    } else {
      expect(nic.resume(peer, std::move(stream), made.keys[side]), "a connection continues");
    }
  }

  void forget() {
    for (const int each : copies_) ::close(each);
    copies_.clear();
  }

  const bool encrypted_;
  std::uint8_t key_ = 0;
  std::vector<int> copies_;
};

void await(const OperationPtr& operation) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (operation->state == State::pending && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  expect(operation->state == State::done, "a message arrives: " + operation->error);
}

// Messages in both directions, in channels and groups, while sockets are lost and replaced. Memory
// is overwritten as soon as a message is sent.
void check_messages(bool encrypted) {
  std::mt19937 random(encrypted ? 5 : 4);
  for (int round = 0; round < 12; ++round) {
    Ranks ranks(2, encrypted);
    std::atomic<bool> ends = false;
    std::thread cutting([&, seed = random()] {
      std::mt19937 own(seed);
      for (int cut = 0; cut < 25 && !ends; ++cut) {  // a frame needs some time for itself
        std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
        if (own() % 2 == 0) ranks.cut();
        const int first = static_cast<int>(own() % 2);
        if (own() % 3 == 0) ranks.cross(first, 1 - first, std::chrono::microseconds(own() % 3000));
        ranks.connect(1, 0);
      }
    });
    std::vector<std::thread> senders;
    for (int from = 0; from < 2; ++from) {
      for (const std::uint16_t channel : {0, 2}) {
        senders.emplace_back([&, from, channel, seed = random()] {
          std::mt19937 own(seed);
          const auto near = ranks.group(from, channel), far = ranks.group(1 - from, channel);
          for (std::uint32_t tag = 0; tag < 60; ++tag) {
            const std::size_t length = own() % 4 == 0 ? own() % 1'500'000 : own() % 300;
            Bytes out(length), into(length);
            for (auto& each : out) each = static_cast<std::uint8_t>(own());
            const Bytes right = out;
            OperationPtr received;
            const bool late = own() % 2 == 0;
            if (!late) received = post(*far, false, from, into, tag, channel);
            const auto sent = post(*near, true, 1 - from, out, tag, channel);
            if (late) received = post(*far, false, from, into, tag, channel);
            await(sent);
            out.assign(length, 0);
            await(received);
            expect(into == right, "a message has its bytes");
          }
        });
      }
    }
    for (auto& each : senders) each.join();
    ends = true;
    cutting.join();
  }
}

std::shared_ptr<const Program> ring(int rank, int size, std::uint64_t n) {
  auto program = std::make_shared<Program>();
  const int blocks = 4 * size;
  const auto at = [&](int number) { return n * static_cast<std::uint64_t>(number) / 4 / static_cast<std::uint64_t>(size); };
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  std::vector<std::vector<Transfer>> sends;
  for (int round = 0; round < 2 * (size - 1); ++round) {
    const int out = ((rank - round) % size + size) % size;
    const int in = (out + size - 1) % size;
    for (int part = 0; part < blocks / size; ++part) {
      const auto tag = static_cast<std::uint32_t>(4 * round + part);
      sends.push_back({{next, at(4 * out + part), at(4 * out + part + 1), tag, false, 0}});
      program->receives.push_back(
          {previous, at(4 * in + part), at(4 * in + part + 1), tag, round < size - 1, 0});
      program->unlocks.emplace_back();
    }
  }
  for (std::size_t i = 0; i < 4; ++i) program->first.push_back(sends[i][0]);
  for (std::size_t i = 4; i < sends.size(); ++i) program->unlocks[i - 4] = sends[i];
  return program;
}

// Sums whose buffers are overwritten as soon as they are done.
void check_sums(bool encrypted) {
  for (const int size : {2, 3}) {
    Ranks ranks(size, encrypted);
    const auto completions = std::make_shared<Completions>();
    std::vector<std::shared_ptr<Lane>> lanes;
    for (int i = 0; i < size; ++i) {
      lanes.push_back(std::make_shared<Lane>(
          std::vector<std::shared_ptr<Group>>{ranks.group(i, 0)}, std::uint16_t{1},
          std::size_t{128}, std::size_t{4}, 256U, completions, static_cast<std::uint64_t>(i)));
    }
    std::mt19937 random(static_cast<unsigned>(size));
    std::atomic<bool> ends = false;
    std::thread cutting([&] {
      for (int cut = 0; cut < 200 && !ends; ++cut) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
        const int i = 1 + static_cast<int>(random() % static_cast<unsigned>(size - 1));
        const int j = static_cast<int>(random() % static_cast<unsigned>(i));
        ranks.connect(i, j);
      }
    });
    std::vector<std::thread> workers;
    for (int rank = 0; rank < size; ++rank) {
      workers.emplace_back([&, rank] {
        std::vector<float> buffer(700'001);
        for (std::uint64_t number = 1; number <= 60; ++number) {
          const std::size_t n = number % 5 == 0 ? buffer.size() : 20'000 * (number % 7);
          for (std::size_t i = 0; i < n; ++i) {
            buffer[i] = static_cast<float>((i + static_cast<std::size_t>(rank) + number) % 16);
          }
          const auto task = std::make_shared<Task>();
          task->program = ring(rank, size, n);
          task->buffer = reinterpret_cast<std::uint8_t*>(buffer.data());
          task->number = number;
          task->base_tag = static_cast<std::uint32_t>(number) << 8;
          lanes[static_cast<std::size_t>(rank)]->submit(task);
          expect(task->wait(30.0, true) && !task->failed(), "a sum ends");
          for (std::size_t i = 0; i < n; ++i) {
            float sum = 0;
            for (int each = 0; each < size; ++each) {
              sum += static_cast<float>((i + static_cast<std::size_t>(each) + number) % 16);
            }
            if (buffer[i] != sum) throw std::runtime_error("a sum is wrong");
          }
          ++checks::count;
        }
      });
    }
    for (auto& each : workers) each.join();
    ends = true;
    cutting.join();
    for (const auto& lane : lanes) lane->fail();
  }
}

// A lost socket fails nothing until the connection is given up.
void check_end() {
  Ranks ranks(2, false);
  Bytes into(10);
  const auto group = ranks.group(0, 0);
  const auto coming = post(*group, false, 1, into, 1, 0);
  ranks.cut();
  const auto lost = [&] { return ranks.nics[0]->health(1)->lost; };
  for (int i = 0; i < 5000 && !lost(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  expect(lost(), "a lost socket is noticed");
  expect(ranks.nics[0]->connected(1) && coming->state == State::pending, "nothing fails yet");
  ranks.nics[0]->give_up(1);
  expect(coming->state == State::failed && coming->error == "the connection was closed by the peer",
         "the reason is that of the loss");
  expect(!ranks.nics[0]->health(1), "there is nothing to continue");
  const auto ends = socket_pair();
  expect(!ranks.nics[0]->resume(1, std::make_unique<Stream>(ends[0]), std::nullopt),
         "a connection that has failed does not continue");
  ::close(ends[1]);
}

// A group that ends, and operations that are cancelled, while the socket is replaced.
void check_groups_and_cancellations() {
  std::mt19937 random(8);
  for (int round = 0; round < 60; ++round) {
    Ranks ranks(2, round % 2 == 0 && can_encrypt());
    auto out = std::make_unique<Bytes>(random() % 900'000);
    Bytes into(out->size());
    struct Silent : Owner {
      void progress(Work&) override {}
    };
    const auto owner = std::make_shared<Silent>();
    auto near = ranks.group(0, 7), far = ranks.group(1, 7);
    const auto sent = post(*near, true, 1, *out, 1, 0, owner);
    const auto coming = post(*far, false, 0, into, 1, 0);
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    Work work;
    if (random() % 2 == 0) {
      near->end(random() % 2 == 0, work);
    } else {
      near->cancel(owner.get(), work);
    }
    out.reset();  // nothing may access it any more
    ranks.connect(1, 0);
    work.run();
    Bytes ping(100, 5), pong(100);
    const auto there = post(*ranks.group(0, 0), true, 1, ping, 2, 0);
    const auto back = post(*ranks.group(1, 0), false, 0, pong, 2, 0);
    await(there);
    await(back);
    expect(pong == ping, "the world goes on");
  }
}

// What the other end of a connection sends over a further socket is checked.
void check_malformed() {
  const auto fails = [](const std::vector<FrameHeader>& before, const std::vector<FrameHeader>& after,
                        const std::string& why) {
    const auto nic = std::make_shared<Nic>("lo");
    nic->start();
    std::array<std::array<int, 2>, 2> sockets{socket_pair(), socket_pair()};
    const auto write = [](int to, const std::vector<FrameHeader>& headers) {
      for (const FrameHeader& each : headers) {
        Bytes bytes(frame_header_bytes + (each.kind == Kind::data ? each.length / 2 : 0));
        write_frame_header(each, bytes.data());
        expect(::write(to, bytes.data(), bytes.size()) > 0, "bytes are written");
      }
    };
    nic->add(0, std::make_unique<Stream>(sockets[0][0]), std::nullopt, true);
    Group member(nic, 0, std::vector<int>{0});
    Bytes into(100);
    const auto coming = post(member, false, 0, into, 1, 0);
    write(sockets[0][1], before);
    ::close(sockets[0][1]);
    for (int i = 0; i < 5000 && !nic->health(0)->lost; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    expect(nic->resume(0, std::make_unique<Stream>(sockets[1][0]), std::nullopt), "it continues");
    write(sockets[1][1], after);
    for (int i = 0; i < 5000 && coming->state == State::pending; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    expect(coming->error == "the peer sent malformed data: " + why, coming->error);
    ::close(sockets[1][1]);
    nic->close(1.0);
  };
  const FrameHeader data{.tag = 1, .length = 100, .total = 100};
  const FrameHeader other{.tag = 2, .length = 100, .total = 100};
  const FrameHeader resume{.kind = Kind::resume};
  fails({data}, {data}, "a further socket does not begin with a resume");
  fails({data}, {{.kind = Kind::credit}}, "a further socket does not begin with a resume");
  fails({data}, {resume, resume}, "a resume is not expected");
  fails({data}, {resume, other}, "the frame that was cut does not come again");
  fails({data}, {{.kind = Kind::resume, .received = 1}}, "it has received more frames than were sent");
}

}  // namespace

void check() {
  for (unsigned seed = 0; seed < 40; ++seed) check_history(seed);
  check_another_frame();
  for (const bool encrypted : {false, true}) {
    if (encrypted && !can_encrypt()) break;
    check_messages(encrypted);
    check_sums(encrypted);
  }
  check_end();
  check_malformed();
  check_groups_and_cancellations();
}

}  // namespace resumes
