// The port of a mailbox: a handshake as the input has it, then a stream of frames, plain and sealed.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "carrier.h"
#include "fuzz.h"
#include "layout.h"

namespace fuzz {

namespace {

using namespace wingbeat::messages;
using wingbeat::Digest;
using wingbeat::store;
using wingbeat::text;

constexpr std::uint32_t dialing = 0, own = 1;
constexpr std::uint64_t session = 100;
constexpr std::uint32_t largest = 1U << 16;
constexpr std::size_t nonce_bytes = 32, tag_bytes = 32;

Digest key() {
  Digest made;
  made.fill(5);
  return made;
}

Digest tag_of(const std::string& role, const std::string& transcript) {
  return wingbeat::hmac_sha256(text(key()), role + transcript);
}

// Kept for all inputs: each is the connection of a peer that has just started.
struct Attacked {
  std::shared_ptr<Carrier> carrier;
  int port = 0;

  explicit Attacked(bool encrypted) {
    Options options;
    options.number = own;
    options.session = 7;
    options.message = largest;
    options.window = 2U << 20;
    options.encrypted = encrypted;
    carrier = std::make_shared<Carrier>(options);
    port = carrier->listen(0, 0, "127.0.0.1", 0);
    carrier->start();
  }
  void restart() {
    carrier->remove_peer(dialing);
    carrier->allow(dialing, session, key());
    carrier->add_route({dialing, 0, 0}, "127.0.0.1", 1, 0);
  }
};

Attacked& attacked(bool encrypted) {
  static Attacked* const plain = new Attacked(false);
  static Attacked* const sealed = wingbeat::net::can_encrypt() ? new Attacked(true) : plain;
  return encrypted ? *sealed : *plain;
}

class Stranger {
 public:
  Stranger(Input input, bool encrypted) : input_(input), at_(attacked(encrypted)) {
    at_.restart();
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const linger none{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(at_.port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0, "cannot connect");
    encrypted_ = encrypted && wingbeat::net::can_encrypt();
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  ~Stranger() { ::close(fd_); }

  void run() {
    if (shake_hands()) {
      for (int left = 200; left > 0 && !input_.empty(); --left) step();
    }
    at_.carrier->refresh();
    Received* last = nullptr;
    while (const ReceivedPtr found = at_.carrier->take(nullptr, false)) {
      check(found->header.length <= largest, "a message is not larger than allowed");
      last = found.get();
    }
    static_cast<void>(last);
    at_.carrier->released();
  }

 private:
  bool shake_hands() {
    std::string challenge(8 + nonce_bytes, '\0');
    if (::recv(fd_, challenge.data(), challenge.size(), MSG_WAITALL) !=
        static_cast<ssize_t>(challenge.size())) {
      return false;
    }
    std::string identity(16, '\0');
    store(identity.data(), dialing);
    store(identity.data() + 4, own);
    std::string answer = "wingbeat" + identity + std::string(nonce_bytes, 'n');
    const std::string transcript = challenge + answer;
    answer += text(tag_of("connect", transcript));
    const std::uint8_t wrong = input_.byte();
    if (wrong > 220) {  // something else
      if (wrong > 240) answer[input_.below(answer.size())] ^= static_cast<char>(input_.byte());
      else answer.resize(input_.below(answer.size()));
      if (wrong == 255) {
        const Bytes any = input_.bytes(200);
        answer.assign(any.begin(), any.end());
      }
    }
    send(answer.data(), answer.size());
    if (wrong > 220) ::shutdown(fd_, SHUT_WR);
    std::string tag(tag_bytes, '\0');
    at_.carrier->refresh();
    if (::recv(fd_, tag.data(), tag.size(), MSG_WAITALL) != static_cast<ssize_t>(tag.size())) {
      return false;
    }
    check(tag == text(tag_of("accept", transcript)), "only a member gets an answer");
    if (encrypted_) sealer_.emplace(tag_of("connecting end", transcript).data());
    return true;
  }

  void step() {
    switch (input_.byte() % 8) {
      case 0: {
        const Bytes any = input_.bytes(input_.byte());
        return send(any.data(), any.size());
      }
      case 1: {
        Header header;
        header.length = static_cast<std::uint32_t>(input_.below(600));
        at_.carrier->post({dialing, 0, 0}, std::make_shared<Owned>(header));
        return;
      }
      case 2: at_.carrier->refresh(); return;
      case 3: {
        std::array<std::uint8_t, 4096> some;
        static_cast<void>(::recv(fd_, some.data(), some.size(), MSG_DONTWAIT));
        return;
      }
      default: return frame();
    }
  }

  struct Owned : Posted {
    explicit Owned(const Header& of) : Posted(of, nullptr), bytes(of.length) {
      payload = bytes.data();
    }
    Bytes bytes;
  };

  void frame() {
    Header header;
    header.type = static_cast<Type>(1 + input_.byte() % 7);
    header.session = session;
    header.sender = dialing;
    header.receiver = own;
    const std::uint8_t more = input_.byte();
    header.sequence = more & 1U ? input_.number() : ++sequence_;
    if (more & 2U) header.arrived = input_.number();
    if (more & 4U) header.taken = input_.number();
    if (more & 8U) header.spans.resize(input_.byte() % 4);
    if (more & 16U) header.length = static_cast<std::uint32_t>(input_.number());
    if (more & 32U) header.dtype = input_.byte();
    Bytes head(header.size());
    write_header(header, head.data());
    if (more & 64U) head[input_.below(head.size())] ^= input_.byte();
    piece(head.data(), header_fixed);
    if (head.size() > header_fixed) piece(head.data() + header_fixed, head.size() - header_fixed);
    Bytes payload(std::min(header.length, largest + 1));
    if (more & 128U) payload.resize(input_.below(payload.size() + 1));
    if (!payload.empty()) piece(payload.data(), payload.size());
  }

  void piece(const std::uint8_t* data, std::size_t count) {
    if (!sealer_) return send(data, count);
    Bytes sealed(count + wingbeat::net::tag_bytes);
    sealer_->seal(data, count, sealed.data());
    send(sealed.data(), sealed.size());
  }

  // What a full socket does not take is lost: a stream that is cut somewhere.
  void send(const void* data, std::size_t count) {
    static_cast<void>(::send(fd_, data, count, MSG_NOSIGNAL | MSG_DONTWAIT));
  }

  Input input_;
  Attacked& at_;
  int fd_ = -1;
  bool encrypted_ = false;
  std::uint64_t sequence_ = 0;
  std::optional<wingbeat::net::Cipher> sealer_;
};

}  // namespace

void run_carrier(Input input) {
  const bool encrypted = input.byte() % 4 == 0;
  Stranger(input, encrypted).run();
}

}  // namespace fuzz
