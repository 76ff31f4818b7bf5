// What the checks of connections between interfaces share.
#pragma once

#include <fcntl.h>

#include <memory>
#include <utility>
#include <vector>

#include "checks.h"
#include "net/group.h"
#include "net/nic.h"
#include "net/ring.h"

namespace checks {

// The keys of one end of a connection, or of the other.
inline wingbeat::net::Keys keys_of(bool connecting) {
  wingbeat::net::Keys keys{};
  keys.sending.fill(connecting ? 1 : 2);
  keys.receiving.fill(connecting ? 2 : 1);
  return keys;
}

// Descriptors of the same memory, for its other end.
inline std::vector<int> copies(const wingbeat::net::Rings& rings) {
  std::vector<int> out;
  for (const int each : rings.descriptors()) out.push_back(::fcntl(each, F_DUPFD_CLOEXEC, 0));
  return out;
}

// Starts to send or receive all the bytes; with `sum`, what is received is added to them.
inline wingbeat::net::OperationPtr post(wingbeat::net::Group& group, bool send, int peer,
                                        Bytes& bytes, std::uint32_t tag = 1,
                                        std::uint16_t channel = 0,
                                        std::shared_ptr<wingbeat::net::Owner> owner = nullptr,
                                        bool sum = false) {
  const auto operation = std::make_shared<wingbeat::net::Operation>();
  (sum ? operation->sum : operation->data) = bytes.data();
  operation->bytes = bytes.size();
  operation->peer = peer;
  operation->tag = tag;
  operation->channel = channel;
  operation->owner = std::move(owner);
  wingbeat::net::Work work;
  send ? group.send(operation, work) : group.receive(operation, work);
  work.run();
  return operation;
}

}  // namespace checks
