// Collectives of which the other rank sends what it likes: chunks of other sizes, tags and contents,
// too early, twice, or never. Their buffers are freed at the end: nothing may use them afterwards.
#include <array>

#include "fuzz.h"
#include "net/coding.h"
#include "net/group.h"
#include "net/lane.h"
#include "peer.h"

namespace fuzz {

namespace {

using namespace wingbeat::net;

constexpr std::uint16_t channel = 1;
constexpr std::uint32_t chunks_per_tag = 256;

struct Submitted {
  std::shared_ptr<Task> task;
  std::unique_ptr<std::uint8_t[]> buffer, residual;
  std::vector<std::uint64_t> receives;  // bytes of each chunk
  std::vector<std::uint32_t> tags;
};

class History {
 public:
  explicit History(Input input)
      : input_(input), peer_(nic_, medium(input_.byte()), false) {
    const auto group = std::make_shared<Group>(nic_, 0, std::vector<int>{Peer::number});
    lane_ = std::make_shared<Lane>(std::vector<std::shared_ptr<Group>>{group}, channel,
                                   std::size_t{1} + input_.byte() % 8,
                                   std::size_t{1} + input_.byte() % 4, chunks_per_tag,
                                   std::make_shared<Completions>(), std::uint64_t{1});
  }
  ~History() {
    lane_->fail();
    for (const auto& each : submitted_) {
      check(each.task->wait(10.0, true), "a collective ends with its lane");
    }
    submitted_.clear();
    nic_->fail("the end");
    nic_->close(0.0);
  }

  void run() {
    for (int left = 300; left > 0 && !input_.empty(); --left) step();
    peer_.serve();
  }

 private:
  static checks::Medium medium(std::uint8_t byte) {
    return byte % 4 == 1 ? checks::Medium::shared_memory : checks::Medium::plain;
  }

  void step() {
    switch (input_.byte() % 8) {
      case 0: return submit();
      case 1: return peer_.serve();
      case 2: return peer_.drain();
      case 3: {
        Waiting found;
        lane_->waiting(found);
        lane_->failure(found);
        return;
      }
      case 4: if (input_.byte() % 16 == 0) peer_.end(SHUT_RDWR); return;
      default: return chunk();
    }
  }

  // An exchange with the peer: each chunk is received, and sent once it was applied or at once.
  void submit() {
    if (submitted_.size() >= 8) return;
    Submitted made;
    made.task = std::make_shared<Task>();
    Task& task = *made.task;
    const std::uint64_t chunks = 1 + input_.byte() % 4, each = input_.below(300);
    const std::uint64_t elements = chunks * each;
    const std::uint8_t form = input_.byte();
    task.dtype = form % 4 == 0 ? static_cast<Dtype>(input_.byte() % 4) : Dtype::float32;
    if (form % 4 == 1) task.packing = std::make_shared<CastPacking>(Dtype::float16);
    made.buffer.reset(new std::uint8_t[8 * elements + 1]());
    made.residual.reset(new std::uint8_t[4 * elements + 1]());
    if (form % 4 == 2) task.packing = encoded(elements, made.residual.get());
    auto program = std::make_shared<Program>();
    for (std::uint64_t i = 0; i < chunks; ++i) {
      const Transfer transfer{.peer = 0, .start = i * each, .stop = (i + 1) * each,
                              .tag = static_cast<std::uint32_t>(i), .reduce = input_.flag()};
      program->receives.push_back(transfer);
      program->unlocks.emplace_back();
      const bool at_once = input_.flag();
      (at_once ? program->first : program->unlocks.back()).push_back(transfer);
      const std::uint64_t bytes = task.packing ? task.packing->bytes(transfer.start, transfer.stop)
                                               : size_of(task.dtype) * each;
      made.receives.push_back(bytes);
      made.tags.push_back(chunks_per_tag * static_cast<std::uint32_t>(submitted_.size()) +
                          transfer.tag);
    }
    task.program = program;
    task.buffer = made.buffer.get();
    task.own_stop = elements;
    task.base_tag = chunks_per_tag * static_cast<std::uint32_t>(submitted_.size());
    task.number = submitted_.size();
    lane_->submit(made.task);
    submitted_.push_back(std::move(made));
  }

  std::shared_ptr<Packing> encoded(std::uint64_t elements, std::uint8_t* residual) {
    auto coding = std::make_shared<Coding>();
    Region region{0, elements, static_cast<Codec>(input_.byte() % 4)};
    region.bits = 1 + input_.byte() % 8;
    region.density = 0.1;
    if (elements > 0) coding->regions.push_back(region);
    return std::make_shared<EncodedPacking>(coding, reinterpret_cast<float*>(residual), 1U);
  }

  // A chunk that the lane awaits, of which the input may change size, tag and contents.
  void chunk() {
    FrameHeader header{.channel = channel};
    const std::uint8_t form = input_.byte();
    if (!submitted_.empty()) {
      const Submitted& of = submitted_[input_.byte() % submitted_.size()];
      const std::size_t which = input_.byte() % of.receives.size();
      header.tag = of.tags[which];
      header.total = of.receives[which];
    }
    if (form % 8 == 1) header.tag = static_cast<std::uint32_t>(input_.number());
    if (form % 8 == 2) header.total = input_.below(5000);
    if (form % 8 == 3) header.channel = static_cast<std::uint16_t>(input_.byte() % 4);
    header.length = static_cast<std::uint32_t>(std::min<std::uint64_t>(header.total, 200'000));
    const Bytes some = (form & 8U) != 0 ? input_.bytes(input_.byte()) : Bytes{};
    Bytes payload(header.length, input_.byte());
    for (std::size_t i = 0; i < payload.size() && !some.empty(); ++i) payload[i] = some[i % some.size()];
    if (header.total == header.length || (form & 16U) == 0) peer_.frame(header, payload);
    if ((form & 32U) != 0) peer_.serve();
  }

  Input input_;
  const std::shared_ptr<Nic> nic_ = std::make_shared<Nic>("lo");
  Peer peer_;
  std::shared_ptr<Lane> lane_;
  std::vector<Submitted> submitted_;
};

}  // namespace

void run_lane(Input input) { History(input).run(); }

}  // namespace fuzz
