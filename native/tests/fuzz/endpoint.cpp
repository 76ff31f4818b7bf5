// All flows of a process in virtual time: frames that a member may send, beside posts, takes, lost
// connections and silence.
#include <memory>
#include <set>

#include "endpoint.h"
#include "fuzz.h"

namespace fuzz {

namespace {

using namespace wingbeat::messages;

constexpr std::uint32_t own = 1, peers = 2;  // peers 0 and 2
constexpr std::uint64_t window = 4096;
constexpr double silence = 30.0;

std::uint64_t session_of(std::uint32_t number) { return 100 + number; }

struct Owned : Posted {
  Owned(const Header& of, std::size_t bytes) : Posted(of, nullptr), memory(new std::uint8_t[bytes]) {
    payload = memory.get();
  }
  void release() override { memory.reset(); }
  std::unique_ptr<std::uint8_t[]> memory;
};

class History {
 public:
  explicit History(Input input) : input_(input), endpoint_(own, session_of(own), window, silence) {
    for (std::uint32_t i = 0; i < peers; ++i) {
      for (std::uint32_t urgency = 0; urgency < 2; ++urgency) routes_.push_back({2 * i, 0, urgency});
    }
    for (const Route& route : routes_) endpoint_.add(route, session_of(route.peer));
  }

  void run() {
    while (!input_.empty() && steps_++ < 2000) {
      step();
      check_bounds();
    }
    endpoint_.abandon();
    for (auto& each : endpoint_.released) each->release();
  }

 private:
  const Route& route() { return routes_[input_.byte() % routes_.size()]; }

  void step() {
    switch (input_.byte() % 14) {
      case 0: case 1: case 2: case 3: return accept();
      case 4: return post(Type::data);
      case 5: if (input_.byte() % 16 == 0) post(Type::leave); return;
      case 6: return send();
      case 7: return endpoint_.connected(route(), input_.flag(), now_);
      case 8: return endpoint_.disconnected(route(), now_);
      case 9: return take();
      case 10: return free();
      case 11:
        now_ += static_cast<double>(input_.number()) * 1e-3;
        return endpoint_.tick(now_);
      case 12: return restart();
      default:
        input_.flag() ? endpoint_.resume(now_) : endpoint_.acknowledge(now_);
    }
  }

  // A frame of the peer; its fields are those of an honest one, or what the input says.
  void accept() {
    const Route& to = route();
    Header header;
    header.type = static_cast<Type>(1 + input_.byte() % 7);
    const std::uint8_t wrong = input_.byte();
    header.session = wrong & 1U && input_.byte() % 8 == 0 ? input_.number() : session_of(to.peer);
    header.sender = wrong & 2U && input_.byte() % 8 == 0 ? input_.byte() : to.peer;
    header.receiver = wrong & 4U && input_.byte() % 8 == 0 ? input_.byte() : own;
    header.sequence = input_.number();
    header.arrived = input_.number();
    header.taken = input_.number();
    header.length = static_cast<std::uint32_t>(input_.below(3000));
    if (wrong & 8U) header.spans.resize(input_.byte());
    endpoint_.accept(to, header, std::make_unique<std::uint8_t[]>(header.length), now_);
  }

  void post(Type type) {
    const Route& to = route();
    Header header;
    header.type = type;
    header.length = type == Type::leave ? 0 : static_cast<std::uint32_t>(input_.below(2000));
    endpoint_.post(to, std::make_shared<Owned>(header, header.length), now_);
  }

  void send() {
    for (const Route& each : endpoint_.take_busy()) {
      for (int left = 1 + input_.byte() % 32; left > 0; --left) {
        const Frame frame = endpoint_.next(each, now_);
        if (frame.header == nullptr) break;
        check(frame.message == nullptr || !frame.message->arrived, "what has arrived is not sent");
      }
    }
  }

  void take() {
    const std::set<std::uint32_t> of{2 * (input_.byte() % peers)};
    if (const auto found = endpoint_.take(now_, input_.flag() ? &of : nullptr, input_.flag())) {
      kept_.push_back(found);
    }
  }
  void free() {
    if (kept_.empty()) return;
    const std::size_t at = input_.byte() % kept_.size();
    endpoint_.free(*kept_[at], now_);
    if (input_.flag()) kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void restart() {
    const std::uint32_t peer = 2 * (input_.byte() % peers);
    endpoint_.remove_peer(peer);
    for (const Route& each : routes_) {
      if (each.peer == peer) endpoint_.add(each, session_of(peer));
    }
  }

  // What a peer sends is kept within its window, and what it asks for is answered once.
  void check_bounds() {
    for (auto& each : endpoint_.released) each->release();
    endpoint_.released.clear();
    check(endpoint_.waiting() <= routes_.size() * window / header_fixed, "a window bounds an inbox");
    for (const Route& each : routes_) {
      check(endpoint_.flow(each)->waiting_bytes() <= window + header_fixed * (steps_ + 1),
            "a window bounds what is posted");
    }
    check(endpoint_.refused.size() < 8, "reasons of refusals are few");
  }

  Input input_;
  Endpoint endpoint_;
  std::vector<Route> routes_;
  std::vector<ReceivedPtr> kept_;
  double now_ = 1.0;
  std::size_t steps_ = 0;
};

}  // namespace

void run_endpoint(Input input) { History(input).run(); }

}  // namespace fuzz
