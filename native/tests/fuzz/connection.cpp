// A connection between ranks: frames in any order and of any form, beside sends, receives, ends of
// groups, cancelled operations and lost sockets.
#include <array>
#include <map>

#include "fuzz.h"
#include "net/cipher.h"
#include "net/group.h"
#include "peer.h"

namespace fuzz {

namespace {

using namespace wingbeat::net;
using checks::Medium;

class Quiet : public Owner {
 public:
  void progress(Work&) override {}
};

struct Running {
  OperationPtr operation;
  std::unique_ptr<Bytes> memory;
  std::shared_ptr<Quiet> owner;
};

Medium medium_of(std::uint8_t byte) {
  if (byte % 4 == 1) return Medium::shared_memory;
  return byte % 4 == 2 && can_encrypt() ? Medium::encrypted : Medium::plain;
}

class History {
 public:
  explicit History(Input input)
      : input_(input),
        mode_(input_.byte()),
        peer_(nic_, medium_of(mode_), mode_ % 4 != 1 && (mode_ & 4U) != 0) {
    for (std::uint64_t id = 0; id < groups_.size(); ++id) {
      groups_[id] = std::make_shared<Group>(nic_, id, std::vector<int>{Peer::number});
    }
  }
  ~History() {
    nic_->fail("the end");
    nic_->close(0.0);
    for (const auto& each : running_) {
      check(each.operation->state != State::pending, "an operation ends with its connection");
    }
  }

  void run() {
    for (int left = 500; left > 0 && !input_.empty(); --left) step();
    peer_.serve();
  }

 private:
  Group& group() { return *groups_[input_.byte() % groups_.size()]; }

  void step() {
    switch (input_.byte() % 16) {
      case 0: return post(false);
      case 1: return post(true);
      case 2: return peer_.serve();
      case 3: return peer_.drain();
      case 4: return peer_.raw(input_.bytes(input_.byte()));
      case 5: {
        const std::uint8_t how = input_.byte();
        return peer_.end(how % 3 == 0 ? SHUT_WR : how % 3 == 1 ? SHUT_RD : SHUT_RDWR);
      }
      case 6: return cancel();
      case 7: {
        Work work;
        Group& ended = group();
        if (&ended != groups_[0].get()) ended.end(input_.flag(), work);
        return work.run();
      }
      case 8:
        if (mode_ % 4 != 1 && (mode_ & 4U) != 0) peer_.resume();
        return;
      case 9:
        if (input_.byte() % 8 == 0) nic_->give_up(Peer::number);
        return;
      default: return frame();
    }
  }

  void post(bool send) {
    Running made{nullptr, std::make_unique<Bytes>(size()), std::make_shared<Quiet>()};
    const auto channel = static_cast<std::uint16_t>(input_.byte() % 4);
    const std::uint32_t tag = input_.byte() % 4;
    const bool sum = !send && input_.flag() && made.memory->size() % 8 == 0;
    made.operation = checks::post(group(), send, 0, *made.memory, tag, channel, made.owner, sum);
    running_.push_back(std::move(made));
  }
  std::size_t size() {
    const std::uint8_t kind = input_.byte();
    return kind < 220 ? 8 * (kind % 16) : input_.below(400'000);
  }

  void cancel() {
    if (running_.empty()) return;
    const std::size_t at = input_.byte() % running_.size();
    Work work;
    for (const auto& each : groups_) each->cancel(running_[at].owner.get(), work);
    work.run();
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));  // its memory with it
  }

  // A frame of an honest peer, or one of which the input changes fields. The next frame of a message
  // continues the one before.
  void frame() {
    FrameHeader header;
    const std::uint8_t form = input_.byte();
    header.kind = static_cast<Kind>(form % 8 < 5 ? 1 : form % 8 - 3);
    header.group = input_.byte() % groups_.size();
    header.channel = static_cast<std::uint16_t>(input_.byte() % 4);
    header.tag = input_.byte() % 4;
    Message& message = messages_[{header.group, header.channel}];
    if (header.kind == Kind::data) {
      if (message.left == 0) message = {header.tag, size(), 0, 0};
      if (message.at == 0) message.left = message.total;
      header.tag = message.tag;
      header.total = message.total;
      header.offset = message.at;
      header.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(
          message.left, (form & 8U) != 0 ? 8 * (1 + input_.byte() % 32) : most_frame_bytes));
      message.at += header.length;
      message.left -= header.length;
    }
    if (header.kind == Kind::resume) header.group = header.channel = 0;
    const std::uint8_t wrong = (form & 16U) != 0 ? input_.byte() : 0;
    if (wrong & 1U) header.length = static_cast<std::uint32_t>(input_.number());
    if (wrong & 2U) header.total = input_.number();
    if (wrong & 4U) header.offset = input_.number();
    if (wrong & 8U) header.tag = static_cast<std::uint32_t>(input_.number());
    if (wrong & 16U) header.channel = static_cast<std::uint16_t>(input_.number());
    if (wrong & 32U) header.group = input_.number();
    if (form & 32U) header.consumed = input_.number();
    if (form & 64U) header.received = input_.number();
    if (form & 128U) peer_.serve();
    peer_.frame(header, Bytes(std::min(header.length, most_frame_bytes), 0x5a));
  }

  struct Message {
    std::uint32_t tag = 0;
    std::uint64_t total = 0, at = 0, left = 0;
  };

  Input input_;
  const std::uint8_t mode_;
  const std::shared_ptr<Nic> nic_ = std::make_shared<Nic>("lo");
  Peer peer_;
  std::array<std::shared_ptr<Group>, 4> groups_;
  std::vector<Running> running_;
  std::map<std::pair<std::uint64_t, std::uint16_t>, Message> messages_;
};

}  // namespace

void run_connection(Input input) { History(input).run(); }

}  // namespace fuzz
