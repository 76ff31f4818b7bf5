#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>

#include "carrier.h"
#include "hostile.h"
#include "layout.h"

namespace hostile {

namespace {

using namespace wingbeat::messages;
using wingbeat::Digest;
using wingbeat::store;
using wingbeat::text;

constexpr std::uint32_t largest = 150U << 10;  // more than a sealed record
constexpr std::uint64_t window = 2U << 20;
// Unread messages that fill the buffers of a socket.
constexpr int unread_messages = 12;
// More than the silent connections that a port keeps.
constexpr std::size_t silent_connections = 90;
// Numbers of the process that is attacked, of an honest one, and of those that are played here:
// `dialing` connects to the one that is attacked, which connects to `dialled`.
constexpr std::uint32_t dialing = 0, own = 1, honest = 2, dialled = 3;
constexpr std::size_t nonce_bytes = 32, tag_bytes = 32;
constexpr std::size_t record_bytes = 128U << 10;  // of a sealed payload

std::uint64_t session_of(std::uint32_t number) { return 100 + number; }

Digest key_of(std::uint32_t peer) {
  Digest key;
  key.fill(static_cast<std::uint8_t>(peer));
  return key;
}

std::string text(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

Digest tag_of(std::uint32_t peer, const std::string& role, const std::string& transcript) {
  return wingbeat::hmac_sha256(text(key_of(peer)), role + transcript);
}

sockaddr_in loopback(int port) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return at;
}

int connect_to(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in at = loopback(port);
  // The port that it gets is free again at once: many connections are made.
  const linger none{1, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  expect(::connect(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0, "cannot connect");
  return fd;
}

std::string read_exactly(int fd, std::size_t bytes) {
  std::string data(bytes, '\0');
  expect(::recv(fd, data.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes),
         "the process that is attacked closed a connection");
  return data;
}

struct Owned : Posted {
  Owned(const Header& of, Bytes from) : Posted(of, nullptr), bytes(std::move(from)) {
    payload = bytes.data();
  }
  Bytes bytes;
};

// The process that is attacked, and an honest one that exchanges messages with it meanwhile.
class Target {
 public:
  explicit Target(bool encrypted = false)
      : carrier(make(own, encrypted)), peer_(make(honest, encrypted)) {
    port = carrier->listen(0, 0, "127.0.0.1", 0);
    const int other = peer_->listen(0, 0, "127.0.0.1", 0);
    carrier->allow(honest, session_of(honest), key_of(honest));
    peer_->allow(own, session_of(own), key_of(honest));
    peer_->add_route({own, 0, 0}, "127.0.0.1", port, 0);
    carrier->add_route({honest, 0, 0}, "127.0.0.1", other, 0);
    peer_->start();
    carrier->start();
  }
  ~Target() {
    carrier->abandon();
    peer_->abandon();
  }

  // Posts a message in both directions; `end_exchange` receives and compares them.
  void begin_exchange(Random& random) {
    for (auto& payload : payloads_) payload = random_bytes(random, random() % 2000);
    post(*carrier, honest, payloads_[0]);
    post(*peer_, own, payloads_[1]);
  }
  void end_exchange() {
    expect_message(*peer_, own, payloads_[0]);
    expect_message(*carrier, honest, payloads_[1]);
    for (const auto& each : {carrier, peer_}) each->released();
  }

  void post(Carrier& from, std::uint32_t to, const Bytes& payload) {
    Header header;
    header.length = static_cast<std::uint32_t>(payload.size());
    expect(from.post({to, 0, 0}, std::make_shared<Owned>(header, payload)), "a window is full");
  }

  // Replaces all state of a peer that is played, as if its process had been started again.
  void restart(std::uint32_t peer, int at) {
    carrier->remove_peer(peer);
    carrier->allow(peer, session_of(peer), key_of(peer));
    carrier->add_route({peer, 0, 0}, "127.0.0.1", at, 0);
  }

  // Compares what was counted with what was expected.
  void expect_refused(const Tally& frames, const Tally& connections) {
    expect_same(carrier->inspect([](const Endpoint& each) { return each.refused; }), frames);
    expect_same(carrier->refused_connections(), connections);
  }

  std::shared_ptr<Carrier> carrier;
  int port = 0;

 private:
  static std::shared_ptr<Carrier> make(std::uint32_t number, bool encrypted) {
    Options options;
    options.number = number;
    options.session = session_of(number);
    options.message = largest;
    options.window = window;
    options.encrypted = encrypted;
    return std::make_shared<Carrier>(options);
  }
  static void expect_same(const Tally& found, const Tally& expected) {
    if (found == expected) return;
    std::string what = "counted are other reasons than expected:";
    for (const auto* each : {&found, &expected}) {
      for (const auto& [reason, count] : *each) what += " " + reason + "=" + std::to_string(count);
      if (each == &found) what += ";";
    }
    throw std::runtime_error(what);
  }
  static void expect_message(Carrier& at, std::uint32_t from, const Bytes& payload) {
    const std::set<std::uint32_t> of{from};
    ReceivedPtr message;
    for (int i = 0; i < 20'000 && message == nullptr; ++i) {
      at.receive(0.001 * (i + 1), at.changes(), &of, false, false, message);
    }
    expect(message != nullptr, "an honest message did not arrive");
    expect(message->header.length == payload.size() &&
               std::equal(payload.begin(), payload.end(), message->payload.get()),
           "an honest message arrived with other bytes");
  }

  std::shared_ptr<Carrier> peer_;
  std::array<Bytes, 2> payloads_;
};

// -- Handshakes ---------------------------------------------------------------------------------

std::string identity(std::uint32_t sender, std::uint32_t receiver, std::uint32_t interface,
                     std::uint32_t urgency) {
  std::string bytes(16, '\0');
  store(bytes.data(), sender);
  store(bytes.data() + 4, receiver);
  store(bytes.data() + 8, interface);
  store(bytes.data() + 12, urgency);
  return bytes;
}

std::string answer(std::uint32_t key, const std::string& challenge, const std::string& who,
                   Random& random) {
  const std::string said = "wingbeat" + who + text(random_bytes(random, nonce_bytes));
  return said + std::string(text(tag_of(key, "connect", challenge + said)));
}

constexpr std::size_t identity_at = 8, nonce_at = 24, tag_at = nonce_at + nonce_bytes;

void flip(std::string& bytes, std::size_t at, std::size_t count, Random& random) {
  bytes[at + random() % count] ^= static_cast<char>(1U << random() % 8);
}

// Returns an answer to a challenge and the reason for which it is refused.
std::pair<std::string, const char*> wrong_answer(const std::string& challenge,
                                                 const std::string& earlier, Random& random) {
  const std::string member = identity(dialing, own, 0, 0);
  std::string right = answer(dialing, challenge, member, random);
  const auto with = [&](std::uint32_t key, std::uint32_t sender, std::uint32_t receiver,
                        std::uint32_t interface, std::uint32_t urgency) {
    return answer(key, challenge, identity(sender, receiver, interface, urgency), random);
  };
  const auto some = [&](std::uint32_t but) {
    return static_cast<std::uint32_t>(other_than(but, 32, random));
  };
  switch (random() % 13) {
    case 0: flip(right, 0, identity_at, random); return {right, "handshake"};
    case 1: return {with(dialing, 4 + random() % 1000, own, 0, 0), "stranger"};
    case 2: return {with(dialing, dialing, some(own), 0, 0), "stranger"};
    case 3: return {with(dialing, dialing, own, some(0), 0), "stranger"};
    case 4: return {with(dialing, dialing, own, 0, some(0)), "stranger"};
    case 5: return {with(honest, honest, own, 0, 0), "stranger"};  // the attacked one dials it
    case 6: return {with(honest, dialing, own, 0, 0), "key"};  // another member in its name
    case 7: flip(right, tag_at, tag_bytes, random); return {right, "key"};
    case 8: flip(right, nonce_at, nonce_bytes, random); return {right, "key"};
    case 9: return {earlier, "key"};  // that of another connection
    case 10: right.resize(random() % right.size()); return {right, "unfinished"};
    case 11: return {"GET / HTTP/1.1\r\n\r\n" + std::string(100, '\0'), "handshake"};
    default: {
      std::string junk = text(random_bytes(random, right.size() + random() % 5000));
      junk[0] = 'x';
      return {junk, "handshake"};
    }
  }
}

int connect_as_member(int port, Random& random, std::string& transcript) {
  const int fd = connect_to(port);
  const std::string challenge = read_exactly(fd, 8 + nonce_bytes);
  const std::string right = answer(dialing, challenge, identity(dialing, own, 0, 0), random);
  ::send(fd, right.data(), right.size(), MSG_NOSIGNAL);
  transcript = challenge + right.substr(0, tag_at);
  const Digest expected = tag_of(dialing, "accept", transcript);
  expect(read_exactly(fd, tag_bytes) == text(expected), "the attacked process has the key");
  return fd;
}

// -- Frames -------------------------------------------------------------------------------------

// A member that is played: it keeps count of what its frames lead to.
class Member {
 public:
  Member(Target& target, std::uint32_t number, Tally& refused)
      : target_(target), number_(number), refused_(refused) {}

  // A new connection, and a new process if the state of the last one was removed.
  void begin(int fd, const std::string& transcript, bool encrypted) {
    fd_ = fd;
    stream_.clear();
    before_.clear();
    sealer_.reset();
    opener_.reset();
    if (!encrypted) return;
    const bool connects = number_ == dialing;
    const Digest out = tag_of(number_, connects ? "connecting end" : "accepting end", transcript);
    const Digest in = tag_of(number_, connects ? "accepting end" : "connecting end", transcript);
    sealer_.emplace(out.data());
    opener_.emplace(in.data());
  }
  void restart() {
    hellos_ = arrived_ = held_ = posted_ = posted_bytes_ = seen_ = repeated_ = 0;
    accepted_.clear();
  }

  // What the attacked one sends to it.
  void expect_posted(std::size_t bytes) {
    ++posted_;
    posted_bytes_ += header_fixed + bytes;
  }

  void hello() { append(header(Type::hello, ++hellos_)); }

  // Appends a frame that does not end the connection.
  void wrong_frame(Random& random, Tally& tally) {
    Header frame = any(random);
    const auto refused = [&](const char* reason) {
      ++refused_[reason];
      ++tally[reason];
    };
    switch (random() % 10) {
      case 0: frame.session = other_than(frame.session, 64, random); refused("session"); break;
      case 1: frame.sender = changed(frame.sender, random); refused("address"); break;
      case 2: frame.receiver = changed(frame.receiver, random); refused("address"); break;
      case 3:
        frame = with_fields(header(Type::hello, random() % (hellos_ + 1)), random);
        refused("replayed");
        break;
      case 4: frame.arrived = above(posted_, random); refused("sequence"); break;
      case 5: frame.taken = above(posted_bytes_, random); refused("sequence"); break;
      case 6:
        frame = with_fields(header(Type::data, random() % (arrived_ + 1)), random);
        ++repeated_;
        ++tally["repeated: dropped"];
        break;
      case 7:
        frame = with_fields(header(one_in(random, 9) ? Type::leave : Type::data,
                                   above(arrived_ + 1, random)),
                            random);
        ++tally["after a gap: dropped"];
        break;
      case 8: {
        constexpr Type controls[] = {Type::welcome, Type::acknowledge, Type::missing, Type::ask};
        frame = with_fields(header(controls[random() % 4], random()), random);
        frame.arrived = random() % (seen_ + 1);
        ++tally["control frames in a wrong order: without effect"];
        break;
      }
      default: return message(random, tally);
    }
    append(frame, random);
  }

  // The next message: it arrives unless the window is full.
  void message(Random& random, Tally& tally) {
    Header frame = with_fields(header(Type::data, arrived_ + 1), random);
    frame.length = static_cast<std::uint32_t>(random() % (one_in(random, 20) ? largest + 1 : 500));
    const Bytes payload = random_bytes(random, frame.length);
    append(frame, payload);
    if (held_ + frame.frame_bytes() > window) {
      ++refused_["window"];
      ++tally["window"];
      return;
    }
    ++arrived_;
    held_ += frame.frame_bytes();
    frame.arrived = frame.taken = 0;
    accepted_.emplace_back(frame, payload);
  }

  // Appends what ends the connection. Returns whether the other side closes it before this one.
  bool wrong_end(Random& random, Tally& tally) {
    Header frame = any(random);
    while (frame.spans.empty()) frame = any(random);
    Bytes bytes = written(frame);
    const auto refused = [&](const char* reason) {
      ++refused_[reason];
      ++tally[reason];
      return true;
    };
    const auto plain = [&](const char* reason) {
      append_pieces(bytes, header_fixed);
      return refused(reason);
    };
    switch (random() % (sealer_ ? 14 : 9)) {
      case 0: flip_bit(bytes, random() % 4, random); return plain("magic");
      case 1: flip_bit(bytes, 4, random); return plain("version");
      case 2: flip_bit(bytes, 8 + random() % (bytes.size() - 8), random); return plain("checksum");
      case 3:
        bytes[5] = static_cast<std::uint8_t>(one_in(random, 4) ? 0 : 8 + random() % 248);
        correct_checksum(bytes);
        return plain("type");
      case 4:
        bytes[6] = static_cast<std::uint8_t>(last_dtype + 1 + random() % (255 - last_dtype));
        correct_checksum(bytes);
        return plain("dtype");
      case 5:
        frame.length = word(random) | largest << 1;
        bytes = written(frame);
        return plain("length");
      case 6:  // more ranges than were sent: zeros follow
        if (frame.spans.size() == most_spans) return plain_junk(random), refused(junk_reason());
        bytes[7] = static_cast<std::uint8_t>(
            frame.spans.size() + 1 + random() % (most_spans - frame.spans.size()));
        bytes.resize(header_fixed + span_bytes * bytes[7]);
        return plain("checksum");
      case 7: plain_junk(random); return refused(junk_reason());
      case 8:  // cut short
        frame.length = 0;
        append(frame);
        stream_.resize(stream_.size() - 1 - random() % (frame.size() - 1));
        ++tally["cut short: dropped with the connection"];
        return false;
      case 9: {
        const std::size_t begin = stream_.size();
        append(frame, random);
        flip_bit(stream_, begin + random() % (header_fixed + wingbeat::net::tag_bytes), random);
        return refused("sealed");
      }
      case 10:
        stream_.insert(stream_.end(), before_.begin(), before_.end());
        return refused("sealed");
      case 11: {  // a record is left out
        const std::size_t begin = stream_.size();
        append(header(Type::ask, 1));
        stream_.resize(begin);
        append(header(Type::ask, 1));
        return refused("sealed");
      }
      case 12:  // not sealed
        bytes.resize(header_fixed + span_bytes * most_spans);
        stream_.insert(stream_.end(), bytes.begin(), bytes.end());
        return refused("sealed");
      default:  // sealed for the other direction
        sealer_.swap(opener_);
        append_pieces(bytes, header_fixed);
        return refused("sealed");
    }
  }

  // Sends what was appended, ends the connection, and looks into what came back.
  void send(bool closed_by_other, Random& random) {
    send_in_pieces(fd_, stream_, random);
    const Bytes back = read_to_end(fd_, !closed_by_other);
    ::close(fd_);
    if (opener_ && !closed_by_other) {
      read_back_sealed(back);
    } else if (!sealer_) {
      read_back(back);
    }
    const auto repeated =
        target_.carrier->inspect([](const Endpoint& each) { return each.repeated(); });
    expect(repeated == repeated_, "repeated messages are counted");
  }

  // Exactly the messages that were sent rightly have arrived.
  void expect_accepted() {
    const std::set<std::uint32_t> of{number_};
    while (const ReceivedPtr found = target_.carrier->take(&of, false)) {
      expect(!accepted_.empty(), "more messages arrived than were sent rightly");
      const auto& [frame, payload] = accepted_.front();
      found->header.arrived = found->header.taken = 0;
      expect(found->header == frame &&
                 std::equal(payload.begin(), payload.end(), found->payload.get()),
             "a message arrived otherwise than it was sent");
      accepted_.pop_front();
    }
    expect(accepted_.empty(), "a message did not arrive beside hostile frames");
    held_ = 0;
  }

  // The last hello or message of a process: nothing can follow.
  void last_words(Random& random, Tally& tally) {
    if (one_in(random, 2)) {
      append(header(Type::hello, hellos_ = ~std::uint64_t{0}));
      append(header(Type::hello, random()));
      ++refused_["replayed"];
      ++tally["replayed"];
    } else {
      append(header(Type::leave, arrived_ + 1));
      if (held_ + header_fixed <= window) return;
      ++refused_["window"];
      ++tally["window"];
    }
  }

 private:
  Header header(Type type, std::uint64_t sequence) const {
    Header made;
    made.type = type;
    made.session = session_of(number_);
    made.sender = number_;
    made.receiver = own;
    made.sequence = sequence;
    made.arrived = seen_;
    return made;
  }
  // Fields that are the user's may have any value.
  static Header with_fields(Header made, Random& random) {
    made.kind = static_cast<std::uint32_t>(random());
    for (auto& each : made.ids) each = static_cast<std::uint32_t>(random());
    made.dtype = static_cast<std::uint8_t>(random() % (last_dtype + 1));
    const std::size_t spans = random() % (one_in(random, 50) ? most_spans + 1 : 3);
    while (made.spans.size() < spans) {
      made.spans.emplace_back(random(), random());
    }
    made.length = static_cast<std::uint32_t>(random() % (one_in(random, 10) ? 5000 : 200));
    return made;
  }
  Header any(Random& random) const {
    constexpr Type types[] = {Type::data, Type::data, Type::welcome, Type::acknowledge,
                              Type::missing, Type::ask, Type::leave};
    return with_fields(header(types[random() % std::size(types)], arrived_ + 1), random);
  }
  static std::uint32_t changed(std::uint32_t value, Random& random) {
    return static_cast<std::uint32_t>(other_than(value, 32, random));
  }
  static void flip_bit(Bytes& bytes, std::size_t at, Random& random) {
    bytes[at] = static_cast<std::uint8_t>(other_than(bytes[at], 8, random));
  }
  static Bytes written(const Header& frame) {
    Bytes bytes(frame.size());
    write_header(frame, bytes.data());
    return bytes;
  }
  static void correct_checksum(Bytes& bytes) {
    constexpr std::size_t at = 72;
    const std::uint32_t before = crc32(bytes.data(), at);
    const std::size_t ranges = bytes.size() - header_fixed;
    store(bytes.data() + at, crc32(bytes.data() + header_fixed, ranges, before));
  }
  const char* junk_reason() const { return sealer_ ? "sealed" : "magic"; }
  void plain_junk(Random& random) {
    Bytes junk = random_bytes(random, 2 * (header_fixed + span_bytes * most_spans));
    junk[0] = 'x';
    junk[7] = 0;
    stream_.insert(stream_.end(), junk.begin(), junk.end());
  }

  void append(const Header& frame) { append_pieces(written(frame), header_fixed); }
  void append(const Header& frame, Random& random) {
    append(frame, random_bytes(random, frame.length));
  }
  void append(const Header& frame, const Bytes& payload) {
    append(frame);
    const std::size_t most = sealer_ ? record_bytes : payload.size();
    for (std::size_t at = 0; at < payload.size(); at += most) {
      piece(payload.data() + at, std::min(most, payload.size() - at));
    }
  }
  // A header and its ranges are sealed one by one.
  void append_pieces(const Bytes& bytes, std::size_t first) {
    piece(bytes.data(), first);
    if (bytes.size() > first) piece(bytes.data() + first, bytes.size() - first);
  }
  void piece(const std::uint8_t* data, std::size_t count) {
    const std::size_t begin = stream_.size();
    if (sealer_) {
      stream_.resize(begin + count + wingbeat::net::tag_bytes);
      sealer_->seal(data, count, stream_.data() + begin);
    } else {
      stream_.insert(stream_.end(), data, data + count);
    }
    if (count != header_fixed) return;
    before_.assign(stream_.begin() + static_cast<std::ptrdiff_t>(begin), stream_.end());
  }

  // Notes which messages of the attacked one have come.
  std::size_t note(const std::uint8_t* data) {
    const Header found = read_header(data, header_fixed);
    expect(found.session == session_of(own) && found.sender == own && found.receiver == number_,
           "a frame of the attacked process has its names");
    if (found.type == Type::data) seen_ = std::max(seen_, found.sequence);
    return found.length;
  }
  void read_back(const Bytes& back) {
    for (std::size_t at = 0; at + header_fixed <= back.size();) {
      at += header_fixed + note(back.data() + at);
    }
  }
  void read_back_sealed(Bytes back) {
    constexpr std::size_t head = header_fixed + wingbeat::net::tag_bytes;
    for (std::size_t at = 0; at + head <= back.size();) {
      expect(opener_->open(back.data() + at, header_fixed, back.data() + at + header_fixed),
             "a frame of the attacked process is sealed");
      const std::size_t length = note(back.data() + at);
      at += head + length;
      for (std::size_t sealed = 0; sealed < length; sealed += record_bytes) {
        at += wingbeat::net::tag_bytes;
        opener_->skip();
      }
    }
  }

  Target& target_;
  const std::uint32_t number_;
  Tally& refused_;
  int fd_ = -1;
  Bytes stream_, before_;  // what is to be sent, and the last sealed header of it
  std::optional<wingbeat::net::Cipher> sealer_, opener_;
  std::uint64_t hellos_ = 0, arrived_ = 0, held_ = 0, repeated_ = 0;  // of its own
  std::uint64_t posted_ = 0, posted_bytes_ = 0, seen_ = 0;           // of the attacked one
  std::deque<std::pair<Header, Bytes>> accepted_;
};

// One connection of a member, with hostile frames and its own.
void send_frames(Member& member, Random& random, Tally& tally) {
  for (auto left = random() % 60; left > 0; --left) member.wrong_frame(random, tally);
  member.send(member.wrong_end(random, tally), random);
}

}  // namespace

Tally attack_handshakes(std::uint64_t frames, Random& random) {
  Target target;
  target.restart(dialing, 1);
  Tally refused;
  const std::string member = identity(dialing, own, 0, 0);
  std::string earlier = answer(dialing, "of another process", member, random);
  std::vector<int> silent;
  for (std::uint64_t sent = 0; sent < frames; ++sent) {
    if (sent % 50 == 0) {
      target.begin_exchange(random);
      // Connections above the limit close the oldest ones.
      const std::size_t count = sent % 1000 == 0 ? silent_connections : 0;
      while (silent.size() < count) silent.push_back(connect_to(target.port));
    }
    const int fd = connect_to(target.port);
    const std::string challenge = read_exactly(fd, 8 + nonce_bytes);
    const auto [wrong, reason] = wrong_answer(challenge, earlier, random);
    earlier = answer(dialing, challenge, member, random);
    send_in_pieces(fd, Bytes(wrong.begin(), wrong.end()), random);
    expect(read_to_end(fd, true).empty(), "a stranger gets no byte");
    ::close(fd);
    ++refused[reason];
    if (sent % 50 != 49) continue;
    refused["unfinished"] += silent.size();
    for (const int each : silent) {
      read_to_end(each, true);
      ::close(each);
    }
    silent.clear();
    target.end_exchange();
    target.expect_refused({}, refused);
  }
  for (const int each : silent) ::close(each);
  return refused;
}

// The port to which a process connects may be another program's, or that of a member.
Tally attack_dialing(std::uint64_t frames, Random& random) {
  Target target;
  Tally tally, refused, refused_connections;
  Member member(target, dialled, refused);
  while (total(tally) < frames) {
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at = loopback(0);
    socklen_t size = sizeof at;
    expect(::bind(listener, reinterpret_cast<sockaddr*>(&at), size) == 0 &&
               ::listen(listener, 8) == 0 &&
               ::getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) == 0,
           "cannot listen");
    target.begin_exchange(random);
    member.restart();
    target.restart(dialled, ntohs(at.sin_port));
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    ::close(listener);
    std::string challenge = "wingbeat" + text(random_bytes(random, nonce_bytes));
    const auto kind = random() % 5;
    if (kind == 0) flip(challenge, 0, 8, random);
    if (kind == 1) challenge.resize(random() % challenge.size());
    send_in_pieces(fd, Bytes(challenge.begin(), challenge.end()), random);
    const auto refuse = [&](const char* reason) {
      ++refused_connections[reason];
      ++tally[reason];
    };
    if (kind < 2) {
      kind == 0 ? refuse("handshake") : void(++tally["cut short: tried again"]);
      read_to_end(fd, kind == 1);
      ::close(fd);
    } else {
      const std::string said = read_exactly(fd, tag_at + tag_bytes);
      const std::string transcript = challenge + said.substr(0, tag_at);
      std::string reply(text(tag_of(dialled, "accept", transcript)));
      if (kind == 2) flip(reply, 0, tag_bytes, random);
      ::send(fd, reply.data(), reply.size(), MSG_NOSIGNAL);
      if (kind == 2) {
        refuse("key");
        read_to_end(fd, false);
        ::close(fd);
      } else {
        member.begin(fd, transcript, false);
        member.hello();
        send_frames(member, random, tally);
        member.expect_accepted();
      }
    }
    target.end_exchange();
    target.expect_refused(refused, refused_connections);
  }
  return tally;
}

Tally attack_messages(std::uint64_t frames, bool encrypted, Random& random) {
  Target target(encrypted);
  target.restart(dialing, 1);
  Tally tally, refused;
  Member member(target, dialing, refused);
  for (unsigned int round = 1; total(tally) < frames; ++round) {
    target.begin_exchange(random);
    if (round % 16 == 0) {
      const bool fills = round % 512 == 496;  // the buffers of the sockets
      const Bytes payload = random_bytes(random, fills ? largest : 100);
      for (int i = 0; i < (fills ? unread_messages : 1); ++i) {
        target.post(*target.carrier, dialing, payload);
        member.expect_posted(payload.size());
      }
    }
    std::string transcript;
    const int fd = connect_as_member(target.port, random, transcript);
    member.begin(fd, transcript, encrypted);
    member.hello();
    const bool last = round % 64 == 0;
    if (last) {
      member.last_words(random, tally);
      member.send(false, random);
    } else {
      send_frames(member, random, tally);
    }
    if (one_in(random, 3)) member.expect_accepted();
    target.end_exchange();
    target.expect_refused(refused, {});
    if (!last) continue;
    target.restart(dialing, 1);
    member.restart();
  }
  return tally;
}

}  // namespace hostile
