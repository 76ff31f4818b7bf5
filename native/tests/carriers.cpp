#include "carriers.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "carrier.h"
#include "checks.h"
#include "layout.h"

namespace carriers {

namespace {

using checks::expect;
using namespace wingbeat::messages;
using wingbeat::Digest;

template <class Holds>
void until(Holds holds, const std::string& what) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ++checks::count;
}

std::string hex(const Digest& digest) {
  std::string out;
  for (const std::uint8_t byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

void check_digests() {
  expect(hex(wingbeat::sha256("abc")) ==
             "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
         "SHA-256 of FIPS 180-4");
  expect(hex(wingbeat::sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
         "SHA-256 of two blocks");
  expect(hex(wingbeat::hmac_sha256("Jefe", "what do ya want for nothing?")) ==
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
         "HMAC-SHA-256 of RFC 4231");
  const Digest one = wingbeat::sha256("abc");
  Digest other = one;
  expect(wingbeat::same_digest(one, other.data()), "equal digests");
  other[31] ^= 1;
  expect(!wingbeat::same_digest(one, other.data()), "unequal digests");
}

// -- One end of a flow --------------------------------------------------------------------------

constexpr std::uint64_t mib = 1U << 20;

struct One {
  std::vector<PostedPtr> released;
  Flow flow{{10, 0, 20, 1}, 32 * mib, 60.0, released};

  One() { flow.accept(of_peer(Type::welcome), 0.0); }

  static Header of_peer(Type type, std::uint64_t sequence = 0, std::uint64_t arrived = 0) {
    Header header;
    header.type = type;
    header.session = 20;
    header.sender = 1;
    header.sequence = sequence;
    header.arrived = arrived;
    return header;
  }

  PostedPtr post(std::uint64_t length) {
    Header header;
    header.length = static_cast<std::uint32_t>(length);
    auto posted = std::make_shared<Posted>(header, nullptr);
    flow.post(posted, 0.0);
    return posted;
  }

  std::vector<Header> sent() {
    std::vector<Header> headers;
    for (Frame frame = flow.next(0.0); frame.header != nullptr; frame = flow.next(0.0)) {
      headers.push_back(*frame.header);
      flow.sent(frame, 0.0);
    }
    return headers;
  }
};

void check_gaps() {
  One one;
  for (const std::uint64_t gap : {0U, 1U}) {
    expect(!one.flow.accept(One::of_peer(Type::data, gap + 2), 0.0), "a message after a gap");
    expect(!one.flow.accept(One::of_peer(Type::data, gap + 3), 0.0), "a later one");
    const auto sent = one.sent();
    expect(sent.size() == 1 && sent[0].type == Type::missing, "a gap is reported at once, once");
    expect(one.flow.accept(One::of_peer(Type::data, gap + 1), 0.0), "the missing message");
  }
}

void check_in_flight() {
  One bytes;
  for (int i = 0; i < 9; ++i) bytes.post(3 * mib);
  expect(bytes.sent().size() == 3, "8 MiB are in flight");
  for (std::uint64_t arrived = 1; arrived < 7; ++arrived) {
    bytes.flow.accept(One::of_peer(Type::acknowledge, 0, arrived), 0.0);
    const auto sent = bytes.sent();
    expect(sent.size() == 1 && sent[0].sequence == arrived + 3, "one follows each that arrives");
  }
  One count;
  for (std::size_t i = 0; i < most_messages_under_way + 5; ++i) count.post(1);
  expect(count.sent().size() == most_messages_under_way, "a number of messages is in flight");
}

void check_answers() {
  One asked;
  for (std::uint64_t i = 1; i < 1000; ++i) {
    asked.flow.accept(One::of_peer(Type::ask, i), 0.0);
    asked.flow.accept(One::of_peer(Type::hello, i), 0.0);
  }
  expect(asked.sent().size() == 2, "answers to endless questions are kept once");
  One down;
  down.post(1);
  down.flow.down();
  expect(down.sent().empty(), "nothing is sent without a connection");
  down.flow.accept(One::of_peer(Type::welcome), 0.0);
  expect(down.sent().size() == 1, "a message waits for the connection");
  One arrives;
  const PostedPtr posted = arrives.post(1);
  arrives.sent();
  expect(!posted->arrived, "nothing has arrived");
  arrives.flow.accept(One::of_peer(Type::acknowledge, 0, 1), 0.0);
  expect(posted->arrived && arrives.released.size() == 1, "what has arrived is released");
}

// -- Carriers -----------------------------------------------------------------------------------

constexpr std::uint64_t largest = 1 << 20;

struct Pair {
  std::vector<std::shared_ptr<Carrier>> ends;
  std::vector<int> ports;
  Digest key{};

  explicit Pair(bool encrypted, int first = 0) {
    key.fill(7);
    for (std::uint32_t i = 0; i < 2; ++i) {
      Options options;
      options.number = i;
      options.session = 100 + i;
      options.message = largest;
      options.window = 4 * largest;
      options.encrypted = encrypted;
      ends.push_back(std::make_shared<Carrier>(options));
      ports.push_back(ends[i]->listen(0, 0, "127.0.0.1", 0));
    }
    for (std::uint32_t i = static_cast<std::uint32_t>(first); i < 2; ++i) {
      ends[i]->allow(1 - i, 101 - i, key);
      ends[i]->add_route({1 - i, 0, 0}, "127.0.0.1", ports[1 - i], 0);
      ends[i]->start();
    }
  }

  ~Pair() {
    for (const auto& each : ends) each->abandon();
  }
};

PostedPtr post(Carrier& carrier, std::uint32_t peer, std::uint32_t kind,
               const std::vector<std::uint8_t>& payload) {
  Header header;
  header.kind = kind;
  header.length = static_cast<std::uint32_t>(payload.size());
  auto posted = std::make_shared<Posted>(header, payload.data());
  while (!carrier.post({peer, 0, 0}, posted)) {
    carrier.wait_room(1.0, carrier.changes(), {peer, 0, 0}, posted->size);
  }
  return posted;
}

ReceivedPtr receive(Carrier& carrier) {
  ReceivedPtr message;
  for (int i = 0; i < 20 && message == nullptr; ++i) {
    carrier.receive(1.0, carrier.changes(), nullptr, false, false, message);
  }
  if (message == nullptr) throw std::runtime_error("no message arrived");
  return message;
}

std::vector<std::uint8_t> payload_of(std::uint32_t number) {
  static constexpr std::size_t sizes[] = {0, 1, 100, 1024, 1025, 65535, 65536, 65537, largest};
  std::vector<std::uint8_t> out(sizes[number % std::size(sizes)]);
  std::mt19937 random(number);
  for (auto& byte : out) byte = static_cast<std::uint8_t>(random());
  return out;
}

// Both ends send to each other from threads of their own.
void check_exchange(bool encrypted) {
  Pair pair(encrypted);
  constexpr std::uint32_t count = 60;
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(2);
  for (std::uint32_t own = 0; own < 2; ++own) {
    threads.emplace_back([&, own] {
      Carrier& carrier = *pair.ends[own];
      std::vector<std::vector<std::uint8_t>> payloads;
      std::vector<PostedPtr> posted;
      for (std::uint32_t i = 0; i < count; ++i) payloads.push_back(payload_of(i));
      std::thread sender([&] {
        for (std::uint32_t i = 0; i < count; ++i) {
          posted.push_back(post(carrier, 1 - own, i, payloads[i]));
        }
      });
      try {
        for (std::uint32_t i = 0; i < count; ++i) {
          const ReceivedPtr message = receive(carrier);
          if (message->header.kind != i) wrong[own] = "messages arrive in order";
          if (message->header.length != payloads[i].size() ||
              (!payloads[i].empty() && std::memcmp(message->payload.get(), payloads[i].data(),
                                                   payloads[i].size()) != 0)) {
            wrong[own] = "a payload arrives as it was posted";
          }
        }
      } catch (const std::runtime_error& error) {
        wrong[own] = error.what();
      }
      sender.join();
      for (int i = 0; i < 20; ++i) carrier.wait_arrived(1.0, carrier.changes(), posted);
      if (carrier.released().size() != count) wrong[own] = "what has arrived is released";
    });
  }
  for (auto& each : threads) each.join();
  for (const auto& each : wrong) expect(each.empty(), each);
  std::vector<std::thread> closing;
  for (const auto& each : pair.ends) closing.emplace_back([&] { each->close(5.0); });
  for (auto& each : closing) each.join();
}

int connect_to(int port, const char* from = "127.0.0.1") {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{}, own{};
  at.sin_family = own.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  ::inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
  ::inet_pton(AF_INET, from, &own.sin_addr);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&own), sizeof own) != 0 ||
      ::connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) {
    throw std::runtime_error("cannot connect");
  }
  return fd;
}

void read_exactly(int fd, std::uint8_t* out, std::size_t bytes) {
  if (::recv(fd, out, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) {
    throw std::runtime_error("the connection ended");
  }
}

// Has a new connection be that of member 0, which has the key.
void answer_as_member(int fd, const Digest& key) {
  std::uint8_t challenge[40], reply[32];
  read_exactly(fd, challenge, sizeof challenge);
  std::string answer = "wingbeat" + std::string(48, '\0');
  const std::uint32_t receiver = 1;
  std::memcpy(answer.data() + 12, &receiver, sizeof receiver);
  const std::string transcript(reinterpret_cast<char*>(challenge), sizeof challenge);
  const Digest tag =
      wingbeat::hmac_sha256(wingbeat::text(key), "connect" + transcript + answer);
  answer.append(wingbeat::text(tag));
  ::send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
  read_exactly(fd, reply, sizeof reply);
}

int connect_as_member(int port, const Digest& key) {
  const int fd = connect_to(port);
  answer_as_member(fd, key);
  return fd;
}

std::vector<std::uint8_t> any_frame(std::mt19937& random) {
  Header header;
  header.type = static_cast<Type>(1 + random() % 7);
  header.session = random() % 20 == 0 ? random() : 100;
  header.sender = random() % 20 == 0 ? random() : 0;
  header.receiver = random() % 20 == 0 ? random() : 1;
  header.sequence = random() % 10 == 0 ? random() : random() % 20;
  header.arrived = random() % 20 == 0 ? random() : 0;
  header.taken = random() % 20 == 0 ? random() : 0;
  header.length = random() % 100 == 0 ? random() : random() % 3 * 700;
  for (unsigned i = random() % 4; i > 0; --i) header.spans.emplace_back(random(), random());
  std::vector<std::uint8_t> bytes(header.size());
  write_header(header, bytes.data());
  if (random() % 100 == 0) bytes[random() % bytes.size()] ^= 1;
  bytes.resize(bytes.size() + header.length % 10000);
  return bytes;
}

// A member that sends anything, in pieces of any size. Everything is refused and counted, or is a
// message; memory stays within the window.
void check_hostile_member() {
  for (const bool encrypted : {false, true}) {
    Pair pair(encrypted, 1);  // number 0 is played here
    Carrier& carrier = *pair.ends[1];
    std::mt19937 random(3);
    for (int round = 0; round < 150; ++round) {
      const int fd = connect_as_member(pair.ports[1], pair.key);
      std::vector<std::uint8_t> bytes;
      for (int i = 0; i < 100; ++i) {
        const auto frame = any_frame(random);
        bytes.insert(bytes.end(), frame.begin(), frame.end());
      }
      for (std::size_t at = 0; at < bytes.size();) {
        const std::size_t length = std::min<std::size_t>(1 + random() % 5000, bytes.size() - at);
        if (::send(fd, bytes.data() + at, length, MSG_NOSIGNAL) < 0) break;
        at += length;
        if (random() % 4 == 0) {
          carrier.refresh();
          carrier.take(nullptr, false);
        }
      }
      ::close(fd);
    }
    const auto refused =
        carrier.inspect([](const Endpoint& endpoint) { return endpoint.refused; });
    expect(refused.contains(encrypted ? "sealed" : "checksum"), "what is no frame is counted");
    expect(encrypted || (refused.contains("session") && refused.contains("address") &&
                         refused.contains("sequence")),
           "frames with wrong fields are counted");
    const auto held = carrier.inspect([](const Endpoint& endpoint) {
      return endpoint.waiting();
    });
    expect(held <= 4 * largest / header_fixed, "no more than a window is held");
  }
}

void send_control(int fd, Type type, std::uint64_t sequence, std::uint64_t arrived,
                  std::uint32_t sender = 0) {
  Header header;
  header.type = type;
  header.session = 100 + sender;
  header.sender = sender;
  header.receiver = 1 - sender;
  header.sequence = sequence;
  header.arrived = arrived;
  std::uint8_t bytes[header_fixed];
  write_header(header, bytes);
  ::send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
}

// A message may arrive while it is sent once more, and its payload is still read then.
void check_release_while_queued() {
  const std::vector<std::uint8_t> payload(largest, 1);
  Pair pair(false, 1);
  Carrier& carrier = *pair.ends[1];
  int fd = connect_as_member(pair.ports[1], pair.key);
  send_control(fd, Type::hello, 1, 0);
  const PostedPtr posted = post(carrier, 0, 5, payload);
  std::vector<std::uint8_t> read(2 * header_fixed + largest);  // welcome and message
  read_exactly(fd, read.data(), read.size());
  ::close(fd);
  fd = connect_as_member(pair.ports[1], pair.key);
  send_control(fd, Type::hello, 2, 0);
  const auto queued = [&] {
    return carrier.inspect([&](const Endpoint&) { return posted->queued; });
  };
  until([&] { return queued() > 0; }, "what may be lost is sent again");
  send_control(fd, Type::acknowledge, 0, 1);
  until([&] { return posted->arrived.load(); }, "it had arrived");
  expect(carrier.released().empty(), "a queued payload is not released");
  ::close(fd);
  until([&] { return carrier.released().size() == 1; }, "it is released with its connection");
}

// A member that sends and reads nothing. What it is to be told waits for the socket; until then the
// carrier must not keep its lock.
void check_blocked_member() {
  const std::vector<std::uint8_t> payload(largest, 1);
  Pair pair(false, 1);
  Carrier& carrier = *pair.ends[1];
  const int fd = connect_as_member(pair.ports[1], pair.key);
  send_control(fd, Type::hello, 1, 0);
  for (int i = 0; i < 3; ++i) post(carrier, 0, 5, payload);
  send_control(fd, Type::data, 1, 0);
  const auto waiting = [&] {
    return carrier.inspect([](const Endpoint& endpoint) { return endpoint.waiting(); });
  };
  until([&] { return waiting() == 1; }, "a message arrives");
  std::this_thread::sleep_for(std::chrono::duration<double>(10 * tell_after));  // it is due then
  auto looking = std::async(std::launch::async, waiting);
  const bool prompt = looking.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  std::vector<std::uint8_t> read(3 * largest);
  read_exactly(fd, read.data(), read.size());
  ::close(fd);
  looking.wait();
  expect(prompt, "a blocked connection does not block the carrier");
}

// Accepts member 0 as member 1, which has the key.
int accept_as_member(int listener, const Digest& key) {
  const int fd = ::accept(listener, nullptr, nullptr);
  std::string transcript = "wingbeat" + std::string(32, '\0');
  ::send(fd, transcript.data(), transcript.size(), MSG_NOSIGNAL);
  std::uint8_t answer[88];
  read_exactly(fd, answer, sizeof answer);
  transcript.append(reinterpret_cast<const char*>(answer), 56);
  const Digest tag = wingbeat::hmac_sha256(wingbeat::text(key), "accept" + transcript);
  ::send(fd, tag.data(), tag.size(), MSG_NOSIGNAL);
  return fd;
}

// A peer that leaves and then accepts no connection: for how many seconds it is dialled.
double seconds_dialled_after_leaving() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  socklen_t size = sizeof at;
  if (::listen(listener, 10) != 0 ||  // on any port
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
    throw std::runtime_error("cannot listen");
  }
  Pair pair(false, 2);  // number 1 is played here
  Carrier& carrier = *pair.ends[0];
  carrier.allow(1, 101, pair.key);
  carrier.add_route({1, 0, 0}, "127.0.0.1", ntohs(at.sin_port), 0);
  carrier.start();
  const int fd = accept_as_member(listener, pair.key);
  send_control(fd, Type::welcome, 0, 0, 1);
  send_control(fd, Type::leave, 1, 0, 1);
  until([&] { return carrier.troubled(); }, "a member leaves");
  ::close(fd);
  const auto begin = std::chrono::steady_clock::now();
  std::chrono::duration<double> last{0};
  pollfd waiting{listener, POLLIN, 0};
  while (last.count() < 15 && ::poll(&waiting, 1, 3000) == 1) {
    ::close(::accept(listener, nullptr, nullptr));
    last = std::chrono::steady_clock::now() - begin;
  }
  ::close(listener);
  return last.count();
}

void check_strangers() {
  const std::vector<std::uint8_t> payload(1000, 9);
  Pair pair(true);
  Carrier& carrier = *pair.ends[1];
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    const int fd = connect_to(pair.ports[1]);
    std::string bytes = random() % 2 == 0 ? "wingbeat" : "";
    bytes.resize(random() % 200);
    for (std::size_t i = 8; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random() % 3);
    ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::close(fd);
  }
  std::vector<int> held;
  for (int i = 0; i < 200; ++i) held.push_back(connect_to(pair.ports[1]));
  const auto count = [&] {
    std::uint64_t sum = 0;
    for (const auto& [reason, number] : carrier.refused_connections()) sum += number;
    return sum;
  };
  until([&] { return count() >= 500 + 200 - 65; }, "strangers are refused and counted");
  const PostedPtr posted = post(*pair.ends[0], 1, 5, payload);
  expect(receive(carrier)->header.kind == 5, "members are served meanwhile");
  until([&] { return posted->arrived.load(); }, "and are told what has arrived");
  for (const int fd : held) ::close(fd);
  until([&] { return count() == 700; }, "each is counted once");
}

// A flood of another host's connections while a member has not answered yet.
void check_flood() {
  Pair pair(false, 1);
  const int member = connect_to(pair.ports[1], "127.0.0.2");
  std::vector<int> held;
  for (int i = 0; i < 300; ++i) held.push_back(connect_to(pair.ports[1]));
  until([&] { return pair.ends[1]->refused_connections()["unfinished"] >= 300 - 65; },
        "a flood is refused");
  answer_as_member(member, pair.key);
  ++checks::count;
  for (const int fd : held) ::close(fd);
  ::close(member);
}

// Forks while other threads use two carriers, whose copies can be used.
void check_forks() {
  Pair pair(false);
  std::atomic<bool> ended = false;
  std::vector<std::thread> threads;
  for (std::uint32_t own = 0; own < 2; ++own) {
    threads.emplace_back([&, own] {
      while (!ended) {
        pair.ends[own]->refresh();
        pair.ends[own]->refused_connections();
      }
    });
  }
  int wrong = 0;
  for (int i = 0; i < 300; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {  // other threads may have held the lock of the allocator: it is not used
      ::alarm(10);
      for (const auto& each : pair.ends) each->forget_after_fork();
      for (const auto& each : pair.ends) each->ended();
      ::_exit(0);
    }
    int status = 1;
    ::waitpid(child, &status, 0);
    wrong += status != 0;
    if (wrong > 0) break;
  }
  ended = true;
  for (auto& each : threads) each.join();
  expect(wrong == 0, "no lock is held in a forked process");
}

// A peer that is removed while it sends, and added again.
void check_removal() {
  for (int round = 0; round < 20; ++round) {
    const std::vector<std::uint8_t> payload(largest, 1);  // is read until the pair is abandoned
    Pair pair(round % 2 == 0);
    std::thread sender([&] {
      Header header;
      header.length = static_cast<std::uint32_t>(payload.size());
      for (int i = 0; i < 4; ++i) {
        pair.ends[0]->post({1, 0, 0}, std::make_shared<Posted>(header, payload.data()));
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 4));
    pair.ends[1]->remove_peer(0);
    sender.join();
    pair.ends[0]->remove_peer(1);
    pair.ends[0]->released();
    for (std::uint32_t i = 2; i > 0; --i) {
      pair.ends[i - 1]->allow(2 - i, 102 - i, pair.key);
      pair.ends[i - 1]->add_route({2 - i, 0, 0}, "127.0.0.1", pair.ports[2 - i], 0);
    }
    const PostedPtr posted = post(*pair.ends[0], 1, 5, payload);
    expect(receive(*pair.ends[1])->header.kind == 5, "a new process is served");
    until([&] { return posted->arrived.load(); }, "and told what has arrived");
  }
}

}  // namespace

void check() {
  auto dialled = std::async(std::launch::async, seconds_dialled_after_leaving);
  check_digests();
  check_gaps();
  check_in_flight();
  check_answers();
  for (const bool encrypted : {false, true}) check_exchange(encrypted);
  check_hostile_member();
  check_release_while_queued();
  check_blocked_member();
  check_strangers();
  check_flood();
  check_forks();
  check_removal();
  const double seconds = dialled.get();
  expect(seconds > 2 && seconds < 10, "a peer that has left is dialled for some seconds");
}

}  // namespace carriers
