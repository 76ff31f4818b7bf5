// A peer of an interface, of which the input decides what it sends. Interface and peer are one
// thread, so that an input is always the same history.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <utility>

#include "connections.h"
#include "fuzz.h"
#include "net/cipher.h"
#include "net/frame.h"
#include "net/nic.h"
#include "net/ring.h"

namespace fuzz {

class Peer {
 public:
  static constexpr int number = 3;

  Peer(std::shared_ptr<wingbeat::net::Nic> nic, checks::Medium medium, bool resumes)
      : nic_(std::move(nic)), medium_(medium) {
    nic_->add(number, connect(), keys(), resumes);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() { close(); }

  // Continues over another socket.
  void resume() {
    close();
    nic_->resume(number, connect(), keys());
  }

  void frame(const wingbeat::net::FrameHeader& header, const Bytes& payload) {
    std::uint8_t bytes[wingbeat::net::frame_header_bytes];
    write_frame_header(header, bytes);
    piece(bytes, sizeof bytes);
    if (!payload.empty()) piece(payload.data(), payload.size());
  }
  void raw(const Bytes& bytes) { write(bytes.data(), bytes.size()); }
  void end(int how) {
    if (theirs_ != nullptr) theirs_->end(how);
  }

  // Lets the interface handle what has arrived.
  void serve() {
    nic_->serve_until([] { return false; }, 0.0);
  }

  // Reads what the interface has sent.
  void drain() {
    std::uint8_t some[65536];
    const iovec part{some, sizeof some};
    while (theirs_ != nullptr && theirs_->read(&part, 1) > 0) {
    }
  }

 private:
  std::optional<wingbeat::net::Keys> keys() const {
    if (medium_ != checks::Medium::encrypted) return std::nullopt;
    return checks::keys_of(true);
  }

  std::unique_ptr<wingbeat::net::Stream> connect() {
    using namespace wingbeat::net;
    const auto sockets = checks::socket_pair();
    if (medium_ == checks::Medium::encrypted) sealer_.emplace(checks::keys_of(true).receiving.data());
    if (medium_ == checks::Medium::shared_memory) {
      const auto created = std::make_shared<Rings>();
      theirs_ = std::make_unique<RingStream>(sockets[1],
                                             std::make_shared<Rings>(checks::copies(*created)));
      return std::make_unique<RingStream>(sockets[0], created);
    }
    theirs_ = std::make_unique<Stream>(sockets[1]);
    return std::make_unique<Stream>(sockets[0]);
  }

  void close() {
    if (theirs_ != nullptr) theirs_->close();
    theirs_.reset();
  }

  void piece(const std::uint8_t* data, std::size_t count) {
    if (!sealer_) return write(data, count);
    Bytes sealed(count + wingbeat::net::tag_bytes);
    sealer_->seal(data, count, sealed.data());
    write(sealed.data(), sealed.size());
  }

  // What does not fit although the interface reads is lost.
  void write(const std::uint8_t* data, std::size_t count) {
    for (int tries = 64; count > 0 && tries > 0 && theirs_ != nullptr; --tries) {
      const iovec part{const_cast<std::uint8_t*>(data), count};
      const ssize_t moved = theirs_->write(&part, 1);
      if (moved > 0) {
        data += moved;
        count -= static_cast<std::size_t>(moved);
      } else if (moved == 0 || (moved != -EAGAIN && moved != -EINTR)) {
        return;
      }
      if (count > 0) serve();
    }
  }

  const std::shared_ptr<wingbeat::net::Nic> nic_;
  const checks::Medium medium_;
  std::unique_ptr<wingbeat::net::Stream> theirs_;
  std::optional<wingbeat::net::Cipher> sealer_;
};

}  // namespace fuzz
