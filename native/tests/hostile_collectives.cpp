#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "connections.h"
#include "hostile.h"
#include "net/cipher.h"
#include "net/coding.h"
#include "net/nic.h"
#include "net/ring.h"

namespace hostile {

namespace {

using checks::copies;
using checks::keys_of;
using namespace wingbeat::net;

constexpr int played = 0, honest = 1;  // peers of the interface that is attacked
// Groups beside the world: one that lasts, one that has ended at the end that is attacked, one for
// the frames that fail a connection, and one that the other end ends.
constexpr std::uint64_t world = 0, untouched = 11, ended_here = 12, fatal_group = 13;
constexpr std::uint64_t ended_there = 14;
constexpr std::uint64_t first_free_group = 1000;
// Channels: of the attacked one's receives, of frames that no receive expects, of the last frame.
constexpr std::uint16_t first_received = 0, first_unexpected = 100, fatal_channel = 200;
constexpr std::uint16_t sending_channel = 300, marker_channel = 301, most_channels = 1024;
constexpr std::uint64_t sent_to_played = 64;
constexpr std::uint16_t unread_channel = 302;
// More than a window.
constexpr std::size_t unread_bytes = 6U << 20;

// Waits for operations.
class Latch : public Owner {
 public:
  void progress(Work&) override {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  // A thread that waits may do the work of the interface's thread.
  void wait(const Operation& operation, Nic* nic = nullptr) {
    const auto ended = [&] { return operation.state != State::pending; };
    if (nic != nullptr) nic->serve_until(ended, 0.2);
    std::unique_lock lock(mutex_);
    expect(changed_.wait_for(lock, std::chrono::seconds(30), ended), "an operation does not end");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Both ends of a connection.
struct Ends {
  std::unique_ptr<Stream> ours, theirs;
  std::shared_ptr<Rings> memory;  // of `theirs`
  int fd = -1;                    // of `theirs`

  explicit Ends(Medium medium) {
    const auto sockets = checks::socket_pair();
    fd = sockets[1];
    if (medium == Medium::shared_memory) {
      const auto created = std::make_shared<Rings>();
      memory = std::make_shared<Rings>(copies(*created));
      ours = std::make_unique<RingStream>(sockets[0], created);
      theirs = std::make_unique<RingStream>(sockets[1], memory);
    } else {
      ours = std::make_unique<Stream>(sockets[0]);
    }
  }
};

// The interface that is attacked, and an honest peer that exchanges messages with it meanwhile.
class Target {
 public:
  explicit Target(Medium medium) : medium_(medium) {
    nic->start();
    peer_->start();
    Ends ends(medium);
    if (ends.theirs == nullptr) ends.theirs = std::make_unique<Stream>(ends.fd);
    nic->add(honest, std::move(ends.ours), keys(true));
    peer_->add(0, std::move(ends.theirs), keys(false));
    near_.emplace(nic, world, std::vector<int>{honest});
    far_.emplace(peer_, world, std::vector<int>{0});
  }
  ~Target() {
    nic->fail("the end");
    nic->close(5.0);
    peer_->close(5.0);
  }

  std::optional<Keys> keys(bool connecting) const {
    if (medium_ != Medium::encrypted) return std::nullopt;
    return keys_of(connecting);
  }

  void begin_exchange(Random& random) {
    for (std::size_t i = 0; i < 2; ++i) {
      sent_[i] = random_bytes(random, random() % (one_in(random, 50) ? 200'000 : 2000));
      got_[i].assign(sent_[i].size(), 0);
      Group& from = i == 0 ? *near_ : *far_;
      Group& to = i == 0 ? *far_ : *near_;
      operations_.push_back(post(from, true, sent_[i], 2, 1));
      operations_.push_back(post(to, false, got_[i], 2, 1));
    }
  }
  void end_exchange() {
    for (const auto& each : operations_) {
      latch->wait(*each);
      expect(each->state == State::done, "an honest message failed: " + each->error);
    }
    operations_.clear();
    expect(got_[0] == sent_[0] && got_[1] == sent_[1], "an honest message has other bytes");
  }

  OperationPtr post(Group& group, bool send, Bytes& bytes, std::uint16_t channel, std::uint32_t tag,
                    bool sum = false) {
    return checks::post(group, send, 0, bytes, tag, channel, latch, sum);
  }

  std::shared_ptr<Nic> nic = std::make_shared<Nic>("lo");
  std::shared_ptr<Latch> latch = std::make_shared<Latch>();

 private:
  const Medium medium_;
  std::shared_ptr<Nic> peer_ = std::make_shared<Nic>("lo");
  std::optional<Group> near_, far_;
  Bytes sent_[2], got_[2];
  std::vector<OperationPtr> operations_;
};

std::string malformed(const char* why) {
  return std::string("the peer sent malformed data: ") + why;
}

const char* const wrong_tag = "an authentication tag is wrong: bytes were changed on their way";
const char* const closed = "the connection was closed by the peer";

// One connection of a rank that is played: receives of the attacked end, hostile frames between the
// messages for them, and a frame that fails the connection.
class Round {
 public:
  Round(Target& target, Medium medium, Random& random, Tally& tally)
      : target_(target), medium_(medium), random_(random), tally_(tally), ends_(medium) {
    if (medium == Medium::encrypted) sealer_.emplace(keys_of(true).receiving.data());
    target.nic->add(played, std::move(ends_.ours), target.keys(true));
    for (const std::uint64_t id : {world, untouched, ended_here, fatal_group, ended_there}) {
      groups_.emplace(id, Group(target.nic, id, {played}));
    }
    Work work;
    groups_.at(ended_here).end(one_in(random, 2), work);
    work.run();
    marker_ = target.post(groups_.at(world), false, marked_, marker_channel, 0);
    const auto sent = target.post(groups_.at(world), true, sent_, sending_channel, 1);
    target.latch->wait(*sent);
    if (!one_in(random, 8)) return;
    unread_.resize(unread_bytes);
    unread_sends_.push_back(target.post(groups_.at(world), true, unread_, unread_channel, 1));
    if (one_in(random, 2)) {
      unread_sends_.push_back(
          target.post(groups_.at(ended_there), true, unread_, unread_channel, 1));
    }
  }
  ~Round() {
    if (ends_.theirs == nullptr) ::close(ends_.fd);
  }

  void run() {
    for (auto left = random_() % 6; left > 0; --left) expect_message();
    const bool ends_there = one_in(random_, 4);
    Bytes never(100);
    OperationPtr of_ended;
    if (ends_there) of_ended = target_.post(groups_.at(ended_there), false, never, 2, 77);
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      order.insert(order.end(), expected_[i].parts.size(), i);
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (auto left = random_() % 60; left > 0; --left) {
      if (!order.empty() && one_in(random_, 4)) {
        send_part(expected_[order.back()]);
        order.pop_back();
      }
      unexpected();
    }
    for (auto left = order.size(); left > 0 && !one_in(random_, 5); --left) {
      send_part(expected_[order[left - 1]]);
    }
    if (ends_there) end_there();
    if (one_in(random_, 3)) send_part_of_stream();
    const std::string reason = fatal();
    ++tally_[reason == closed ? "cut short: " + reason : reason];
    send(reason != closed);
    target_.latch->wait(*marker_, one_in(random_, 2) ? target_.nic.get() : nullptr);
    expect(marker_->error == reason,
           "a connection failed for another reason: " + marker_->error + " instead of " + reason);
    check_received(reason);
    for (const auto& each : unread_sends_) {
      target_.latch->wait(*each);
      expect(each->state == State::failed, "what is not read is not sent");
    }
    if (!ends_there) return;
    target_.latch->wait(*of_ended);
    expect(of_ended->error == end_reason_ || of_ended->error == reason,
           "the operation of a group that has ended failed for another reason: " + of_ended->error);
  }

 private:
  struct Expected {
    OperationPtr operation;
    std::uint64_t group;
    std::uint16_t channel;
    std::uint32_t tag;
    Bytes into, message;
    bool sum = false;
    bool late = false;  // the receive is posted after a part of the stream, or at the end
    std::vector<std::size_t> parts;  // lengths of the frames
    std::size_t sent = 0, next = 0;
    std::string error;  // why the receive is to fail alone
  };

  // Posts a receive, and divides its message into frames.
  void expect_message() {
    expected_.reserve(8);
    Expected& made = expected_.emplace_back();
    made.group = one_in(random_, 2) ? world : untouched;
    made.channel = static_cast<std::uint16_t>(first_received + 2 * expected_.size());
    made.tag = word(random_);
    // Some are larger than what is credited at a time.
    const std::size_t size = 4 * (random_() % (one_in(random_, 30) ? 400'000 : 300));
    const std::size_t other = one_in(random_, 5) ? size + 4 * (1 + random_() % 50) : size;
    made.message = random_bytes(random_, other);
    made.into.assign(size, 0);
    made.sum = one_in(random_, 3);
    made.late = one_in(random_, 3);
    if (!made.late) post_receive(made);
    if (other != size) {
      made.error = "sent " + std::to_string(other) + " bytes where " + std::to_string(size) +
                   " were expected";
      ++tally_["a message of another size: its receive fails alone"];
    }
    std::size_t left = other;
    do {
      const std::size_t part = std::min(left, 4 * (1 + random_() % (other / 8 + 1)));
      made.parts.push_back(std::min<std::size_t>(part, most_frame_bytes));
      left -= made.parts.back();
    } while (left > 0);
  }

  void post_receive(Expected& of) {
    of.operation =
        target_.post(groups_.at(of.group), false, of.into, of.channel, of.tag, of.sum);
  }

  // Sends what there is before late receives are posted: parts of their messages have arrived.
  void send_part_of_stream() {
    send(true);
    stream_.clear();
    for (Expected& each : expected_) {
      if (each.operation == nullptr) post_receive(each);
    }
  }

  // A group in which messages are expected, have begun and wait is ended by the other end.
  void end_there() {
    const bool failed = one_in(random_, 2);
    frame({.channel = 4, .tag = 1, .length = 8, .total = 100, .group = ended_there});
    frame({.kind = Kind::credit, .channel = 4, .group = ended_there});
    frame({.channel = 6, .tag = 3, .length = 8, .total = 8, .group = ended_there});
    const std::uint32_t tag = failed ? 1 + word(random_) % 9 : 0;
    frame({.kind = Kind::end, .tag = tag, .group = ended_there});
    end_reason_ = failed ? "the group has failed at the peer" : "the peer has closed the group";
    ++tally_["the end of a group with messages in progress: they fail"];
  }

  void send_part(Expected& message) {
    const std::size_t length = message.parts[message.next++];
    frame({.channel = message.channel,
           .tag = message.tag,
           .length = static_cast<std::uint32_t>(length),
           .offset = message.sent,
           .total = message.message.size(),
           .group = message.group},
          message.message.data() + message.sent);
    message.sent += length;
  }

  // A frame that the other end accepts, and that leads to nothing.
  void unexpected() {
    const auto channel = static_cast<std::uint16_t>(first_unexpected + random_() % 20);
    const std::uint64_t group = one_in(random_, 2) ? world : untouched;
    const auto length = static_cast<std::uint32_t>(random_() % 300);
    FrameHeader header{.channel = channel, .tag = word(random_), .group = group};
    switch (random_() % 6) {
      case 0:
        header.kind = Kind::credit;
        if (one_in(random_, 9)) header.channel = static_cast<std::uint16_t>(random_() % 1024);
        ++tally_["a credit for nothing: without effect"];
        if (header.channel == sending_channel) header.consumed = acknowledged_;
        break;
      case 1:
        header.kind = Kind::end;
        header.group = first_free_group + groups_ended_++;
        header.tag = word(random_);
        ++tally_["the end of a group that does not exist: remembered"];
        break;
      case 2:
        header.group = ended_here;
        header.length = length;
        header.total = random_() % most_message_bytes;
        header.total = std::max<std::uint64_t>(header.total, length);
        header.offset = random_() % (header.total - length + 1);
        header.consumed = random_();
        if (length == 0) header.total = header.offset = 0;
        ++tally_["a frame of an ended group: dropped"];
        break;
      case 3:
        header.channel = static_cast<std::uint16_t>(channel + 20);
        if (!begun_.insert(header.channel).second) return;  // it stays incomplete
        header.group = world;
        header.length = length;
        header.total = length + (length > 0 ? random_() % (1U << 30) : 0);
        ++tally_["the begin of a message that never ends: dropped with the connection"];
        break;
      default:
        header.length = length;
        header.total = length;
        ++tally_["a message that is not received: dropped with the connection"];
    }
    frame(header);
  }

  // Appends a frame that fails the connection; returns the reason.
  std::string fatal() {
    FrameHeader header{.channel = fatal_channel, .tag = 5, .length = 40, .total = 40};
    header.group = one_in(random_, 2) ? world : fatal_group;
    const auto failed = [&](const char* why) {
      frame(header);
      return malformed(why);
    };
    switch (random_() % (sealer_ ? 28 : 24)) {
      case 0: return damaged(header, 0, 4, "a frame has a wrong magic number");
      case 1:
        return damaged(header, 4, frame_header_bytes - 4, "a frame header has a wrong checksum");
      case 2:
        header.kind = static_cast<Kind>(one_in(random_, 4) ? 0 : 5 + random_() % 251);
        return failed("a frame has an unknown kind");
      case 3:
        header.length = most_frame_bytes + 1 + static_cast<std::uint32_t>(random_() % 0xfff00000U);
        header.total = above(header.length, random_) % most_message_bytes;
        return failed("a frame is too long");
      case 4:
        header.total = above(most_message_bytes, random_);
        return failed("a message is too long");
      case 5:
        header.offset = above(header.total, random_);
        return failed("a frame exceeds its message");
      case 6: header.offset = 1 + random_() % 40; return failed("a frame exceeds its message");
      case 7: header.kind = Kind::credit; return failed("a credit has a payload");
      case 8: header.kind = Kind::end; return failed("an end has a payload");
      case 9:
        header = {.kind = Kind::end, .tag = static_cast<std::uint32_t>(random_() % 3)};
        return failed("the world has no end");
      case 10: header.length = 0; return failed("a frame of a message is empty");
      case 11:
        header.channel =
            static_cast<std::uint16_t>(most_channels + random_() % (65536 - most_channels));
        return failed("there is no such channel");
      case 12:
        header.consumed = above(0, random_);
        return failed("it acknowledges more than was sent");
      case 13:
        header.group = world;
        header.channel = sending_channel;
        header.consumed = acknowledged_ = 1 + random_() % sent_to_played;
        frame(header);
        --header.consumed;
        return failed("an acknowledgement decreased");
      case 14: begin(header); return failed("a message begins within another one");
      case 15: begin(header); return continued_otherwise(header);
      case 16:
        header.offset = 1;
        header.length = 39;
        return failed("a frame does not continue its message");
      case 17: {
        frame(header);  // complete: nothing is to be continued
        header.offset = 8;
        header.length = 32;
        return failed("a frame does not continue its message");
      }
      case 18: {
        const FrameHeader end{.kind = Kind::end, .tag = word(random_) % 2, .group = fatal_group};
        frame(end);
        header.group = fatal_group;
        if (one_in(random_, 2)) return failed("a frame follows the end of its group");
        frame(end);
        return malformed("a group ends twice");
      }
      case 19: return one_in(random_, 40) ? too_much(header) : divided(header);
      case 20: cut_short(header); return closed;
      case 21: {
        Bytes junk = random_bytes(random_, 200 + random_() % 3000);
        junk[0] = 0;
        stream_.insert(stream_.end(), junk.begin(), junk.end());
        return sealer_ ? malformed(wrong_tag) : malformed("a frame has a wrong magic number");
      }
      case 22:
        header.received = above(sent_to_played + unread_bytes, random_);
        return failed("it has received more frames than were sent");
      case 23:
        header = {.kind = Kind::resume, .tag = word(random_) % 2};
        if (one_in(random_, 2)) return failed("a resume is not expected");
        header.length = header.total = 1 + word(random_) % 100;
        return failed("a resume has a payload");
      case 24: {
        const std::size_t at = stream_.size();
        frame(header);
        flip(at + random_() % (frame_header_bytes + tag_bytes));
        return malformed(wrong_tag);
      }
      case 25: {
        const std::size_t at = stream_.size();
        frame({.kind = Kind::credit, .channel = fatal_channel});
        const Bytes again(stream_.begin() + static_cast<std::ptrdiff_t>(at), stream_.end());
        stream_.insert(stream_.end(), again.begin(), again.end());
        return malformed(wrong_tag);
      }
      case 26: {
        const std::size_t at = stream_.size();
        frame({.kind = Kind::credit, .channel = fatal_channel});
        stream_.resize(at);  // left out
        frame(header);
        return malformed(wrong_tag);
      }
      default: {  // the payload of a message
        const std::size_t at = stream_.size() + frame_header_bytes + tag_bytes;
        frame(header);
        flip(at + random_() % (header.length + tag_bytes));
        return malformed(wrong_tag);
      }
    }
  }

  // Begins a message of which the given frame is to be the rest.
  void begin(FrameHeader& header) {
    header.length = 8;
    frame(header);
    header.length = 32;
  }

  std::string continued_otherwise(FrameHeader header) {
    header.offset = 8;
    switch (random_() % 3) {
      case 0: header.tag = static_cast<std::uint32_t>(other_than(header.tag, 32, random_)); break;
      case 1: header.total = 40 + 1 + random_() % 1000; break;
      default: header.offset = 16; header.length = 24;
    }
    frame(header);
    return malformed("a frame does not continue its message");
  }

  // Limits that take many frames.
  std::string too_much(FrameHeader header) {
    header.group = fatal_group;
    switch (random_() % 4) {
      case 0:
        header.length = most_frame_bytes;
        header.total = most_message_bytes;
        for (; header.offset < window_bytes; header.offset += header.length) frame(header);
        frame(header);
        return malformed("a channel exceeds its window");
      case 1:
        header.length = header.total = 0;
        for (std::uint32_t i = 0; i <= 1U << 16; ++i) frame(header);
        return malformed("too many messages are not received");
      case 2:  // more than are remembered
        header = {.kind = Kind::end};
        for (std::uint64_t i = 0; i < 2 * most_ended_groups; ++i) {
          header.group = 2 * first_free_group + i;
          frame(header);
        }
        cut_short({.channel = fatal_channel, .length = 8, .total = 8});
        return closed;
      default:
        header = {.kind = Kind::credit, .group = fatal_group};
        for (std::uint32_t i = 0; i <= 4096; ++i) {
          header.channel = static_cast<std::uint16_t>(i % most_channels);
          header.group = 2 * first_free_group + i / most_channels;
          frame(header);
        }
        return malformed("too many channels are open");
    }
  }

  // A sum is added where it arrives, so frames of it hold whole elements.
  std::string divided(FrameHeader header) {
    if (medium_ != Medium::shared_memory) {
      cut_short(header);
      return closed;
    }
    summed_.assign(40, 0);
    target_.post(groups_.at(header.group), false, summed_, header.channel, header.tag, true);
    header.length = static_cast<std::uint32_t>(4 * (random_() % 9) + 1 + random_() % 3);
    frame(header);
    return malformed("a frame divides an element");
  }

  std::string damaged(const FrameHeader& header, std::size_t at, std::size_t count,
                      const char* why) {
    Bytes bytes(frame_header_bytes);
    write_frame_header(header, bytes.data());
    const std::size_t place = at + random_() % count;
    bytes[place] = static_cast<std::uint8_t>(other_than(bytes[place], 8, random_));
    piece(bytes.data(), bytes.size());
    return malformed(why);
  }

  void cut_short(const FrameHeader& header) {
    frame(header);
    stream_.resize(stream_.size() - 1 - random_() % (frame_header_bytes + header.length - 1));
  }

  void flip(std::size_t at) {
    stream_[at] = static_cast<std::uint8_t>(other_than(stream_[at], 8, random_));
  }

  void frame(const FrameHeader& header, const std::uint8_t* payload = nullptr) {
    std::uint8_t bytes[frame_header_bytes];
    write_frame_header(header, bytes);
    piece(bytes, sizeof bytes);
    if (header.kind != Kind::data || header.length == 0 || header.length > most_frame_bytes) return;
    if (payload != nullptr) return piece(payload, header.length);
    const Bytes any(header.length, 0x5a);
    piece(any.data(), any.size());
  }
  void piece(const std::uint8_t* data, std::size_t count) {
    const std::size_t begin = stream_.size();
    if (sealer_) {
      stream_.resize(begin + count + tag_bytes);
      sealer_->seal(data, count, stream_.data() + begin);
    } else {
      stream_.insert(stream_.end(), data, data + count);
    }
  }

  // `open`: this end does not end the connection.
  void send(bool open) {
    if (medium_ == Medium::shared_memory) return send_by_ring(open);
    send_in_pieces(ends_.fd, stream_, random_);
    if (!open) read_to_end(ends_.fd, true);
  }
  void send_by_ring(bool open) {
    for (std::size_t at = 0; at < stream_.size() && marker_->state == State::pending;) {
      const std::size_t most = one_in(random_, 8) ? 100 : 200'000;
      const iovec part{stream_.data() + at, std::min(1 + random_() % most, stream_.size() - at)};
      const ssize_t moved = ends_.theirs->write(&part, 1);
      if (moved > 0) at += static_cast<std::size_t>(moved);
      if (moved < 0) std::this_thread::yield();
    }
    if (!open) ends_.theirs->end(SHUT_RDWR);
  }

  void check_received(const std::string& reason) {
    for (Expected& each : expected_) {
      const bool at_end = each.operation == nullptr;
      if (at_end) post_receive(each);  // what has arrived completely can be received
      target_.latch->wait(*each.operation);
      const bool complete = each.next == each.parts.size();
      const bool began = each.next > 0;
      const bool failed = each.operation->state == State::failed;
      if (!each.error.empty() && (at_end ? complete : began)) {
        expect(failed && each.operation->error == each.error,
               "a message of another size fails its receive");
      } else if (complete) {
        expect(!failed, "a message did not arrive beside hostile frames: " + each.operation->error);
        const Bytes got = received(each);
        expect(got == each.message, "a message arrived otherwise than it was sent");
      } else {
        expect(failed && each.operation->error == reason,
               "what has not arrived fails with the connection");
      }
    }
  }
  // What has arrived, also if it waits to be added.
  static Bytes received(const Expected& of) {
    const Operation& operation = *of.operation;
    if (operation.sum == nullptr || operation.bytes == 0) return of.into;
    if (!operation.summed) return {operation.data, operation.data + operation.bytes};
    Bytes sum(of.message.size(), 0);
    add(operation.dtype, sum.data(), of.message.data(), sum.size() / size_of(operation.dtype));
    expect(sum == of.into, "a sum arrived otherwise than it was sent");
    return of.message;
  }

  Target& target_;
  const Medium medium_;
  Random& random_;
  Tally& tally_;
  Ends ends_;
  std::optional<Cipher> sealer_;
  std::map<std::uint64_t, Group> groups_;
  std::vector<Expected> expected_;
  Bytes marked_ = Bytes(8), sent_ = Bytes(sent_to_played, 3), summed_, unread_;
  std::vector<OperationPtr> unread_sends_;
  std::string end_reason_;
  OperationPtr marker_;
  Bytes stream_;
  std::uint64_t groups_ended_ = 0, acknowledged_ = 0;
  std::set<std::uint16_t> begun_;  // channels with a message that never ends
};

}  // namespace

Tally attack_collectives(std::uint64_t frames, Medium medium, Random& random) {
  Target target(medium);
  Tally tally;
  while (total(tally) < frames) {
    target.begin_exchange(random);
    Round(target, medium, random, tally).run();
    target.end_exchange();
  }
  return tally;
}

// A process that shares memory with the attacked one, and writes there what it likes, while both
// ends send and receive.
Tally attack_ring_memory(std::uint64_t frames, Random& random) {
  Target target(Medium::shared_memory);
  Tally tally;
  while (total(tally) < frames) {
    target.begin_exchange(random);
    Ends ends(Medium::shared_memory);
    target.nic->add(played, std::move(ends.ours));
    Group group(target.nic, world, {played});
    Bytes out = random_bytes(random, 300'000), into(out.size()), sum(out.size());
    std::vector<OperationPtr> posted{target.post(group, true, out, 4, 1),
                                     target.post(group, false, into, 4, 1),
                                     target.post(group, false, sum, 6, 1, true)};
    Bytes stream(frame_header_bytes + 4000);
    write_frame_header({.channel = static_cast<std::uint16_t>(one_in(random, 2) ? 4 : 6),
                        .tag = 1,
                        .length = 4000,
                        .total = out.size()},
                       stream.data());
    const iovec part{stream.data(), stream.size()};
    ends.theirs->write(&part, 1);
    for (auto left = 1 + random() % 200; left > 0; --left) {
      RingState& state = ends.memory->state(one_in(random, 2));
      const std::uint64_t near = state.written + random() % 9 - 4;
      const std::uint64_t value = one_in(random, 2) ? near : random() >> random() % 64;
      switch (random() % 7) {
        case 0: state.written = value; ++tally["written bytes"]; break;
        case 1: state.consumed = value; ++tally["consumed bytes"]; break;
        case 2: state.reader_sleeps = word(random); ++tally["reader's flag"]; break;
        case 3: state.writer_sleeps = word(random); ++tally["writer's flag"]; break;
        case 4: {
          const Bytes some = random_bytes(random, random() % 100);
          std::uint8_t* const data = ends.memory->data(one_in(random, 2));
          const std::uint64_t at = one_in(random, 2) ? near % (ring_bytes - 100) : random() % 5000;
          std::copy(some.begin(), some.end(), data + at);
          ++tally["bytes"];
          break;
        }
        case 5: {
          const std::uint64_t rung = one_in(random, 99) ? ~std::uint64_t{0} - 1 : 1;
          [[maybe_unused]] const ssize_t written =
              ::write(ends.memory->bell(false), &rung, sizeof rung);
          ++tally["doorbells"];
          break;
        }
        default: ends.theirs->write(&part, 1); ++tally["frames"];
      }
    }
    if (one_in(random, 20)) {
      ::send(ends.fd, "x", 1, MSG_NOSIGNAL);
      ++tally["bytes of the socket"];
    }
    ends.theirs->end(SHUT_RDWR);
    const std::uint64_t ring = 1;
    [[maybe_unused]] const ssize_t written = ::write(ends.memory->bell(false), &ring, sizeof ring);
    for (const auto& each : posted) target.latch->wait(*each);
    target.end_exchange();
  }
  return tally;
}

// Payloads of which a part is changed, in memory that ends where they do.
Tally attack_codecs(std::uint64_t frames, Random& random) {
  Tally tally;
  while (total(tally) < frames) {
    const std::uint64_t n = 1 + random() % (one_in(random, 20) ? 200'000 : 3000);
    auto coding = std::make_shared<Coding>();
    for (std::uint64_t at = 0; at < n;) {
      Region region{at, std::min(n, at + 1 + random() % n), static_cast<Codec>(random() % 4)};
      region.bits = static_cast<int>(1 + random() % 8);
      if (region.codec == Codec::topk && one_in(random, 2)) region.bits = whole_bits;
      region.density = one_in(random, 2) ? 0.01 : 0.1;
      at = region.stop;
      coding->regions.push_back(region);
    }
    const EncodedPacking packing(coding, nullptr, 1);
    std::vector<float> values(n);
    for (float& each : values) each = static_cast<float>(random() % 2000) - 1000.0F;
    Bytes payload(packing.bytes(0, n));
    packing.pack(reinterpret_cast<std::uint8_t*>(values.data()), 0, n, payload.data(), false);
    for (int round = 0; round < 40 && !payload.empty(); ++round) {
      Bytes changed = payload;
      for (auto left = 1 + random() % 4; left > 0; --left) {
        const std::size_t at = random() % changed.size();
        const Bytes some = random_bytes(random, std::min(1 + random() % 8, changed.size() - at));
        std::copy(some.begin(), some.end(), changed.begin() + static_cast<std::ptrdiff_t>(at));
      }
      std::vector<float> into(n, 1.0F);
      auto* const buffer = reinterpret_cast<std::uint8_t*>(into.data());
      const char* const why = packing.unpack(changed.data(), buffer, 0, n, one_in(random, 2));
      ++tally[why == nullptr ? "other values: a payload of the same form" : why];
    }
  }
  return tally;
}

}  // namespace hostile
