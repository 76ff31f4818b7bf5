#include "carrier.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "layout.h"

namespace wingbeat::messages {

namespace {

// Bytes of a socket's buffer in the kernel: urgent frames cannot overtake its contents.
constexpr int send_buffer_bytes = 1 << 18;
// Bytes of one system call, and bytes after which other connections are served.
constexpr std::size_t most_call_bytes = 256U << 10;
constexpr std::size_t most_turn_bytes = 1U << 20;
// Bytes read after the rest of a payload: the next header, and small messages.
constexpr std::size_t staging_bytes = 64U << 10, read_ahead_bytes = 4U << 10;
// A payload up to this size is copied behind its header.
constexpr std::size_t most_inline_bytes = 1024;
constexpr std::size_t most_gathered = 16;
// Bytes of a payload that are sealed at a time: they stay in the processor's cache.
constexpr std::size_t record_bytes = 128U << 10;

constexpr double handshake_s = 10.0;
// Unauthenticated connections in excess of the expected ones; then one is closed.
constexpr std::size_t most_strangers = 64;
constexpr double retry_first_s = 0.05, retry_most_s = 1.0, accept_pause_s = 0.1;
// For how long a connection to a peer that has left is renewed: it may wait for acknowledgements.
constexpr double left_retry_s = 5.0;
// A thread that has waited is expected to wait again; the carrier's own stays away for as long.
constexpr double grace_s = 0.002;
// The longest wait of a condition variable, whose clock counts nanoseconds in 64 bits.
constexpr double far_s = 1e9;
// Timers that are this late show that the process was suspended.
constexpr double suspended_s = 1.0;

constexpr std::string_view magic = "wingbeat";
constexpr std::size_t nonce_bytes = 32, tag_bytes = 32, identity_bytes = 16;
constexpr std::size_t challenge_bytes = magic.size() + nonce_bytes;
constexpr std::size_t answer_bytes = magic.size() + identity_bytes + nonce_bytes + tag_bytes;

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

using wingbeat::text;

std::string_view text(const std::uint8_t* data, std::size_t bytes) {
  return {reinterpret_cast<const char*>(data), bytes};
}

std::string nonce() {
  std::string bytes(nonce_bytes, '\0');
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "no random numbers");
  }
  return bytes;
}

Digest tag_of(const Digest& key, std::string_view role, const std::string& transcript) {
  return hmac_sha256(text(key), std::string(role) + transcript);
}

bool set(int fd, int level, int option, int value) {
  return ::setsockopt(fd, level, option, &value, sizeof value) == 0;
}

std::string host_of(const sockaddr_storage& address) {
  const auto* four = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&address);
  if (address.ss_family == AF_INET6) return std::string(text(six->sin6_addr.s6_addr, 16));
  return std::to_string(four->sin_addr.s_addr);
}

void watch(int epoll, int operation, int fd, std::uint64_t id, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  ::epoll_ctl(epoll, operation, fd, &event);
}

}  // namespace

Carrier::Address::Address(const std::string& host, int port) {
  auto* four = reinterpret_cast<sockaddr_in*>(&storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&storage);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof *four;
  } else if (::inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<std::uint16_t>(port));
    size = sizeof *six;
  } else {
    throw std::system_error(EINVAL, std::generic_category(), host);
  }
}

// A thread of this process that holds a lock while another one forks would hold it in the forked
// process for ever.
struct Carrier::All {
  All() { ::pthread_atfork([] { all().lock(); }, [] { all().unlock(); }, [] { all().unlock(); }); }

  void lock() {
    mutex.lock();
    for (Carrier* each : carriers) each->mutex_.lock();
  }
  void unlock() {
    for (Carrier* each : carriers) each->mutex_.unlock();
    mutex.unlock();
  }

  std::mutex mutex;
  std::set<Carrier*> carriers;
};

Carrier::All& Carrier::all() {
  static All* const made = new All;  // forks may follow the end of static objects
  return *made;
}

Carrier::Carrier(const Options& options)
    : options_(options),
      endpoint_(options.number, options.session, options.window, options.silence),
      staging_(std::make_unique_for_overwrite<std::uint8_t[]>(staging_bytes)) {
  if (options.encrypted && !net::can_encrypt()) {
    throw std::runtime_error("this processor has no AES instructions");
  }
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ >= 0) event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_ < 0) {
    const int error = errno;
    if (epoll_ >= 0) ::close(epoll_);
    throw std::system_error(error, std::generic_category(), "cannot open a mailbox");
  }
  watch(epoll_, EPOLL_CTL_ADD, event_, 0, EPOLLIN);
  const std::lock_guard lock(all().mutex);
  all().carriers.insert(this);
}

Carrier::~Carrier() {
  {
    const std::lock_guard lock(all().mutex);
    all().carriers.erase(this);
  }
  abandon_locked();
  if (epoll_ >= 0) ::close(epoll_);
  if (event_ >= 0) ::close(event_);
}

// -- Connections --------------------------------------------------------------------------------

bool Carrier::configure(int fd, int tos) const {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return false;
  const bool six = own.ss_family == AF_INET6;
  set(fd, six ? IPPROTO_IPV6 : IPPROTO_IP, six ? IPV6_TCLASS : IP_TOS, tos);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(1e3 * options_.heartbeat));
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, std::max(1, static_cast<int>(options_.heartbeat / 10) - 1));
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, SOL_SOCKET, SO_SNDBUF, send_buffer_bytes);
  return set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

int Carrier::listen(std::uint32_t interface, std::uint32_t urgency, const std::string& address,
                    int tos) {
  const Address at(address, 0);
  const int fd = ::socket(at.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (fd < 0 || ::bind(fd, at.get(), at.size) != 0 || ::listen(fd, 1024) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    throw std::system_error(error, std::generic_category(), "cannot listen on " + address);
  }
  const std::lock_guard lock(mutex_);
  listeners_[next_id_++] = {fd, interface, urgency, tos};
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<sockaddr_in&>(own).sin_port);
}

void Carrier::close_listeners_except(const std::set<std::uint32_t>& interfaces) {
  const std::lock_guard lock(mutex_);
  close_listeners(interfaces);
}

void Carrier::close_listeners(const std::set<std::uint32_t>& except) {
  std::erase_if(listeners_, [&](const auto& each) {
    if (except.contains(each.second.interface)) return false;
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, each.second.fd, nullptr);  // a forked process may have a copy
    ::close(each.second.fd);
    return true;
  });
}

void Carrier::start() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, listener] : listeners_) {
    watch(epoll_, EPOLL_CTL_ADD, listener.fd, id, EPOLLIN);
  }
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Carrier::allow(std::uint32_t peer, std::uint64_t session, const Digest& key) {
  const std::lock_guard lock(mutex_);
  peers_[peer] = {session, key};
}

void Carrier::add_route(const Route& route, const std::string& address, int port,
                        std::uint32_t theirs) {
  const Address at(address, port);  // throws before anything refers to it
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  endpoint_.add(route, peers_.at(route.peer).session);
  Link& link = links_[route];
  link = {at, theirs, options_.number < route.peer, 0, 0, retry_first_s, -never};
  if (link.dials) dial(route, link, now_s());
  settle();
}

void Carrier::remove_peer(std::uint32_t peer) {
  const std::lock_guard lock(mutex_);
  peers_.erase(peer);
  for (auto it = links_.begin(); it != links_.end();) {
    if (it->first.peer == peer) {
      const std::uint64_t connection = it->second.connection;
      it = links_.erase(it);
      close_connection(connection);
    } else {
      ++it;
    }
  }
  endpoint_.remove_peer(peer);
  publish();
}

Carrier::Connection& Carrier::add_connection(int fd, bool incoming, Stage stage) {
  auto made = std::make_unique<Connection>();
  made->id = next_id_++;
  made->fd = fd;
  made->incoming = incoming;
  made->stage = stage;
  made->deadline = now_s() + handshake_s;
  timer_due_ = std::min(timer_due_, made->deadline);
  watch(epoll_, EPOLL_CTL_ADD, fd, made->id, stage == Stage::connecting ? EPOLLOUT : EPOLLIN);
  Connection& connection = *made;
  connections_[made->id] = std::move(made);
  return connection;
}

void Carrier::dial(const Route& route, Link& link, double now) {
  link.retry_at = now + link.retry_after;
  link.retry_after = std::min(2 * link.retry_after, retry_most_s);
  timer_due_ = std::min(timer_due_, link.retry_at);
  const auto listener = std::find_if(listeners_.begin(), listeners_.end(), [&](const auto& each) {
    return each.second.interface == route.interface && each.second.urgency == route.urgency;
  });
  if (listener == listeners_.end()) return;
  const int fd = ::socket(link.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  if (!configure(fd, listener->second.tos) ||
      (::connect(fd, link.address.get(), link.address.size) != 0 && errno != EINPROGRESS)) {
    ::close(fd);
    return;
  }
  Connection& connection = add_connection(fd, false, Stage::connecting);
  connection.route = route;
  connection.theirs = link.theirs;
  link.connection = connection.id;
}

// Closes the oldest unauthenticated connection of the address that has the most, so that a flood
// from one host does not close the handshakes of others. False if there is none.
bool Carrier::make_room_for_stranger() {
  std::map<std::string_view, std::size_t> counts;
  Connection* found = nullptr;
  for (const auto& [id, each] : connections_) counts[each->from] += each->stranger();
  for (const auto& [id, each] : connections_) {
    if (!each->stranger()) continue;
    if (found == nullptr || counts[each->from] > counts[found->from]) found = each.get();
  }
  if (found != nullptr) fail(*found, "unfinished");
  return found != nullptr;
}

void Carrier::accept_from(std::uint64_t id) {
  const Listener& listener = listeners_.at(id);
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd = ::accept4(listener.fd, reinterpret_cast<sockaddr*>(&from), &size,
                           SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    if (make_room_for_stranger()) return;
    accepting_ = false;  // until a timer tries again
    for (const auto& [each, of] : listeners_) watch(epoll_, EPOLL_CTL_MOD, of.fd, each, 0);
    timer_due_ = std::min(timer_due_, now_s() + accept_pause_s);
    return;
  }
  const auto strangers = static_cast<std::size_t>(
      std::count_if(connections_.begin(), connections_.end(),
                    [](const auto& each) { return each.second->stranger(); }));
  if (strangers >= most_strangers + links_.size()) make_room_for_stranger();
  if (!configure(fd, listener.tos)) {
    ::close(fd);
    return;
  }
  Connection& connection = add_connection(fd, true, Stage::answer);
  connection.from = host_of(from);
  connection.route = {0, listener.interface, listener.urgency};
  if (const char* why = begin_challenge(connection)) fail(connection, why);
}

void Carrier::fail(Connection& connection, const char* reason) {
  if (connection.open()) {
    ++endpoint_.refused[reason];
  } else if (connection.incoming || std::string_view(reason) != "unfinished") {
    ++refused_connections_[reason];
  }
  close_connection(connection.id);
}

void Carrier::close_connection(std::uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const std::unique_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  block(*connection, false);
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, connection->fd, nullptr);  // a forked process may have a copy
  ::close(connection->fd);
  for (const Out& out : connection->out) {
    if (out.message != nullptr) --out.message->queued;
  }
  if (connection->sealing != nullptr) --connection->sealing->queued;
  if (connection->open()) ++ended_;
  const auto link = links_.find(connection->route);
  if (link == links_.end() || link->second.connection != id) return;
  const double now = now_s();
  link->second.connection = 0;
  endpoint_.disconnected(connection->route, now);
  if (!link->second.dials) return;
  if (connection->open()) {
    link->second.down_at = now;
    link->second.retry_after = retry_first_s;
    link->second.retry_at = now + retry_first_s;
  }
  timer_due_ = std::min(timer_due_, link->second.retry_at);
}

// -- Handshake ----------------------------------------------------------------------------------

void Carrier::expect(Connection& connection, Stage stage, std::uint8_t* target,
                     std::size_t bytes) {
  connection.stage = stage;
  connection.target = target;
  connection.want = bytes + (connection.opener && stage >= Stage::header ? net::tag_bytes : 0);
  connection.filled = 0;
}

// The bytes of a handshake always fit into the empty buffer of a socket.
bool Carrier::send_now(const Connection& connection, const std::string& bytes) {
  return ::send(connection.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

const char* Carrier::begin_challenge(Connection& connection) {
  connection.transcript = std::string(magic) + nonce();
  expect(connection, Stage::answer, connection.head.data(), answer_bytes);
  return send_now(connection, connection.transcript) ? nullptr : "unfinished";
}

const char* Carrier::read_challenge(Connection& connection) {
  const std::string challenge(text(connection.head.data(), challenge_bytes));
  const auto peer = peers_.find(connection.route.peer);
  if (!challenge.starts_with(magic) || peer == peers_.end()) return "handshake";
  std::string identity(identity_bytes, '\0');
  store(identity.data(), options_.number);
  store(identity.data() + 4, connection.route.peer);
  store(identity.data() + 8, connection.theirs);
  store(identity.data() + 12, connection.route.urgency);
  const std::string answer = std::string(magic) + identity + nonce();
  connection.transcript = challenge + answer;
  const Digest tag = tag_of(peer->second.key, "connect", connection.transcript);
  expect(connection, Stage::confirmation, connection.head.data(), tag_bytes);
  return send_now(connection, answer + std::string(text(tag))) ? nullptr : "unfinished";
}

const char* Carrier::read_answer(Connection& connection) {
  const std::uint8_t* data = connection.head.data();
  const std::uint8_t* identity = data + magic.size();
  if (text(data, magic.size()) != magic) return "handshake";
  const auto peer = peers_.find(load<std::uint32_t>(identity));
  if (peer == peers_.end()) return "stranger";
  connection.transcript += text(data, answer_bytes - tag_bytes);
  const Digest tag = tag_of(peer->second.key, "connect", connection.transcript);
  if (!same_digest(tag, data + answer_bytes - tag_bytes)) return "key";
  connection.route.peer = peer->first;
  const auto link = links_.find(connection.route);
  if (load<std::uint32_t>(identity + 4) != options_.number ||
      load<std::uint32_t>(identity + 8) != connection.route.interface ||
      load<std::uint32_t>(identity + 12) != connection.route.urgency || link == links_.end() ||
      link->second.dials) {
    return "stranger";
  }
  const Digest reply = tag_of(peer->second.key, "accept", connection.transcript);
  if (!send_now(connection, std::string(text(reply)))) return "unfinished";
  close_connection(std::exchange(link->second.connection, connection.id));
  establish(connection, peer->second.key);
  return nullptr;
}

const char* Carrier::read_confirmation(Connection& connection) {
  const auto peer = peers_.find(connection.route.peer);
  if (peer == peers_.end()) return "stranger";
  const Digest tag = tag_of(peer->second.key, "accept", connection.transcript);
  if (!same_digest(tag, connection.head.data())) return "key";
  links_.at(connection.route).retry_after = retry_first_s;
  establish(connection, peer->second.key);
  return nullptr;
}

void Carrier::establish(Connection& connection, const Digest& key) {
  if (options_.encrypted) {
    const Digest out = tag_of(key, "connecting end", connection.transcript);
    const Digest in = tag_of(key, "accepting end", connection.transcript);
    static_assert(net::key_bytes <= std::tuple_size_v<Digest>);
    connection.sealer.emplace((connection.incoming ? in : out).data());
    connection.opener.emplace((connection.incoming ? out : in).data());
  }
  connection.transcript.clear();
  expect(connection, Stage::header, connection.head.data(), header_fixed);
  endpoint_.connected(connection.route, !connection.incoming, now_s());
}

// -- Reading ------------------------------------------------------------------------------------

void Carrier::read(Connection& connection) {
  const std::uint64_t id = connection.id;
  std::size_t turn = 0;
  while (true) {
    const std::size_t missing = connection.want - connection.filled;
    const bool direct = connection.stage == Stage::payload &&
                        connection.header.length > read_ahead_bytes;
    iovec parts[2];
    int count = 0;
    if (direct) {
      parts[count++] = {connection.target + connection.filled, std::min(missing, most_call_bytes)};
    }
    parts[count++] = {staging_.get(), direct ? read_ahead_bytes : staging_bytes};
    // Only the end of a piece is followed by bytes of the next one.
    if (missing > most_call_bytes) count = 1;
    const std::size_t asked = parts[0].iov_len + (count > 1 ? parts[1].iov_len : 0);
    const ssize_t got = count == 1 ? ::recv(connection.fd, parts[0].iov_base, asked, 0)
                                   : ::readv(connection.fd, parts, count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      if (connection.open()) return close_connection(id);
      return fail(connection, "unfinished");
    }
    const auto bytes = static_cast<std::size_t>(got);
    const std::size_t placed = direct ? std::min(bytes, parts[0].iov_len) : 0;
    connection.filled += placed;
    const std::uint8_t* from = staging_.get();
    std::size_t staged = bytes - placed;
    while (true) {
      const std::size_t part = std::min(staged, connection.want - connection.filled);
      if (part > 0) std::memcpy(connection.target + connection.filled, from, part);
      connection.filled += part;
      from += part;
      staged -= part;
      if (connection.filled < connection.want) break;
      try {
        if (const char* why = end_piece(connection)) return fail(connection, why);
      } catch (const Malformed& error) {
        return fail(connection, error.what());
      }
      if (staged == 0) break;
    }
    turn += bytes;
    if (bytes < asked || turn >= most_turn_bytes) return;
  }
}

// Reacts to a complete piece, and selects the next one. Returns null, or why the connection ends;
// throws Malformed for a header.
const char* Carrier::end_piece(Connection& connection) {
  switch (connection.stage) {
    case Stage::challenge:
      return read_challenge(connection);
    case Stage::answer:
      return read_answer(connection);
    case Stage::confirmation:
      return read_confirmation(connection);
    default:
      break;
  }
  if (connection.opener && connection.want > 0) {
    const std::size_t plain = connection.want - net::tag_bytes;
    if (!connection.opener->open(connection.target, plain, connection.target + plain)) {
      return "sealed";
    }
  }
  if (connection.stage == Stage::header) return read_header_piece(connection);
  if (connection.stage == Stage::ranges) return begin_payload(connection);
  connection.payload_done += connection.want - (connection.opener ? net::tag_bytes : 0);
  if (connection.payload_done < connection.header.length) {
    expect_payload(connection);
  } else {
    deliver(connection);
  }
  return nullptr;
}

const char* Carrier::read_header_piece(Connection& connection) {
  const std::size_t ranges = span_bytes * spans_of(connection.head.data());
  if (ranges == 0) return begin_payload(connection);
  expect(connection, Stage::ranges, connection.head.data() + header_fixed, ranges);
  return nullptr;
}

const char* Carrier::begin_payload(Connection& connection) {
  connection.header = read_header(connection.head.data(), most_header_bytes);
  if (connection.header.length > options_.message) return "length";
  connection.payload_done = 0;
  if (connection.header.length == 0) {
    deliver(connection);
    return nullptr;
  }
  connection.payload = std::make_unique_for_overwrite<std::uint8_t[]>(
      connection.header.length + (connection.opener ? net::tag_bytes : 0));
  expect_payload(connection);
  return nullptr;
}

// Without encryption a payload is one piece; a record's tag is overwritten by the next record.
void Carrier::expect_payload(Connection& connection) {
  const std::size_t left = connection.header.length - connection.payload_done;
  expect(connection, Stage::payload, connection.payload.get() + connection.payload_done,
         connection.opener ? std::min(left, record_bytes) : left);
}

void Carrier::deliver(Connection& connection) {
  endpoint_.accept(connection.route, std::move(connection.header), std::move(connection.payload),
                   now_s());
  expect(connection, Stage::header, connection.head.data(), header_fixed);
}

// -- Writing ------------------------------------------------------------------------------------

void Carrier::block(Connection& connection, bool blocked) {
  if (connection.blocked == blocked) return;
  connection.blocked = blocked;
  blocked_ += blocked ? 1 : -1;
  watch(epoll_, EPOLL_CTL_MOD, connection.fd, connection.id,
        EPOLLIN | (blocked ? std::uint32_t{EPOLLOUT} : 0U));
  if (blocked && !driving_) background_.notify_one();
}

void Carrier::gather(Connection& connection, double now) {
  while (connection.out.size() < most_gathered && connection.out_bytes < most_call_bytes) {
    Frame frame = endpoint_.next(connection.route, now);
    if (frame.header == nullptr) return;
    const std::size_t size = frame.header->size();
    const std::size_t length = frame.message == nullptr ? 0 : frame.header->length;
    const bool copied = length <= most_inline_bytes;
    Out& out = connection.out.emplace_back();
    out.head.resize(size + (copied ? length : 0));
    write_header(*frame.header, out.head.data());
    if (copied) {
      if (length > 0) std::memcpy(out.head.data() + size, frame.message->payload, length);
    } else {
      ++frame.message->queued;
      out.message = std::move(frame.message);
    }
    connection.out_bytes += size + length;
  }
}

// Seals until a record's worth of bytes is ready to be sent.
void Carrier::seal_more(Connection& connection, double now) {
  if (connection.sealed == nullptr) {
    connection.sealed = std::make_unique_for_overwrite<std::uint8_t[]>(
        record_bytes + record_bytes + most_header_bytes + 3 * net::tag_bytes);
  }
  connection.sealed_begin = connection.sealed_end = 0;
  while (connection.sealed_end < record_bytes) {
    if (connection.sealing != nullptr) {
      const std::size_t left = connection.sealing->header.length - connection.sealing_at;
      const std::size_t part = std::min(left, record_bytes);
      seal(connection, connection.sealing->payload + connection.sealing_at, part);
      connection.sealing_at += part;
      if (part == left) {
        --connection.sealing->queued;
        connection.sealing = nullptr;
      }
      continue;
    }
    Frame frame = endpoint_.next(connection.route, now);
    if (frame.header == nullptr) return;
    std::array<std::uint8_t, most_header_bytes> head;
    write_header(*frame.header, head.data());
    seal(connection, head.data(), header_fixed);
    const std::size_t ranges = frame.header->size() - header_fixed;
    if (ranges > 0) seal(connection, head.data() + header_fixed, ranges);
    if (frame.message == nullptr || frame.header->length == 0) continue;
    ++frame.message->queued;
    connection.sealing = std::move(frame.message);
    connection.sealing_at = 0;
  }
}

void Carrier::seal(Connection& connection, const std::uint8_t* data, std::size_t bytes) {
  connection.sealer->seal(data, bytes, connection.sealed.get() + connection.sealed_end);
  connection.sealed_end += bytes + net::tag_bytes;
}

void Carrier::write(Connection& connection) {
  const double now = now_s();
  std::size_t turn = 0;
  while (turn < most_turn_bytes) {
    iovec parts[2 * most_gathered];
    std::size_t count = 0, bytes = 0;
    if (connection.sealer) {
      if (connection.sealed_begin == connection.sealed_end) seal_more(connection, now);
      bytes = connection.sealed_end - connection.sealed_begin;
      parts[count++] = {connection.sealed.get() + connection.sealed_begin, bytes};
    } else {
      gather(connection, now);
      for (const Out& out : connection.out) {
        const std::size_t head = std::min(out.sent, out.head.size());
        if (head < out.head.size()) {
          parts[count++] = {const_cast<std::uint8_t*>(out.head.data()) + head,
                            out.head.size() - head};
        }
        if (out.message != nullptr) {
          const std::size_t at = out.sent - head;
          parts[count++] = {const_cast<std::uint8_t*>(out.message->payload) + at,
                            out.message->header.length - at};
        }
      }
      bytes = connection.out_bytes;
    }
    if (bytes == 0) return block(connection, false);
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t result =
        count == 1 ? ::send(connection.fd, parts[0].iov_base, parts[0].iov_len, MSG_NOSIGNAL)
                   : ::sendmsg(connection.fd, &message, MSG_NOSIGNAL);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return block(connection, true);
    if (result < 0) return close_connection(connection.id);
    auto sent = static_cast<std::size_t>(result);
    turn += sent;
    if (connection.sealer) {
      connection.sealed_begin += sent;
      continue;
    }
    connection.out_bytes -= sent;
    while (sent > 0) {
      Out& out = connection.out.front();
      const std::size_t part = std::min(sent, out.bytes() - out.sent);
      out.sent += part;
      sent -= part;
      if (out.sent < out.bytes()) break;
      if (out.message != nullptr) --out.message->queued;
      connection.out.pop_front();
    }
  }
  block(connection, true);
}

void Carrier::flush_busy() {
  for (const Route& route : endpoint_.take_busy()) {
    const auto link = links_.find(route);
    if (link == links_.end()) continue;
    const auto found = connections_.find(link->second.connection);
    if (found == connections_.end()) continue;
    Connection& connection = *found->second;
    if (connection.open() && !connection.blocked) write(connection);
  }
}

// -- Events -------------------------------------------------------------------------------------

void Carrier::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
}

// Sends what a call has queued, and has the driving thread respect its timers.
void Carrier::settle() {
  if (endpoint_.busy()) flush_busy();
  publish();
  const double due = std::min(timer_due_, endpoint_.due());
  if (!driving_ || due >= drive_limit_) return;
  drive_limit_ = due;
  signal();
}

void Carrier::publish() {
  troubled_.store(!endpoint_.lost().empty() || !endpoint_.left().empty(),
                  std::memory_order_release);
  changes_.store(endpoint_.changes, std::memory_order_release);
  if (!endpoint_.released.empty()) releasable_.store(true, std::memory_order_release);
}

void Carrier::serve(std::uint64_t id, std::uint32_t events) {
  if (id == 0) {
    std::uint64_t value = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_, &value, sizeof value);
    return;
  }
  if (listeners_.contains(id)) return accept_from(id);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;  // it was closed meanwhile
  Connection& connection = *found->second;
  if (connection.stage == Stage::connecting) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(connection.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return close_connection(id);
    watch(epoll_, EPOLL_CTL_MOD, connection.fd, id, EPOLLIN);
    return expect(connection, Stage::challenge, connection.head.data(), challenge_bytes);
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    read(connection);
    if (!connections_.contains(id)) return;
  }
  if ((events & EPOLLOUT) && connection.open()) write(connection);
}

void Carrier::run_timers(double now) {
  if (now >= timer_due_) {
    timer_due_ = never;
    if (!std::exchange(accepting_, true)) {
      for (const auto& [id, each] : listeners_) watch(epoll_, EPOLL_CTL_MOD, each.fd, id, EPOLLIN);
    }
    std::vector<std::uint64_t> late;
    for (const auto& [id, each] : connections_) {
      if (each->open()) continue;
      if (each->deadline <= now) {
        late.push_back(id);
      } else {
        timer_due_ = std::min(timer_due_, each->deadline);
      }
    }
    for (const std::uint64_t id : late) fail(*connections_.at(id), "unfinished");
    for (auto& [route, link] : links_) {
      if (!link.dials || link.connection != 0 || leaving_) continue;
      if (endpoint_.left().contains(route.peer) && now > link.down_at + left_retry_s) continue;
      if (link.retry_at <= now) {
        dial(route, link, now);
      } else {
        timer_due_ = std::min(timer_due_, link.retry_at);
      }
    }
  }
  endpoint_.tick(now);
}

// Waits for events and serves them, once. The lock is released while it waits; a look without a
// wait keeps it, so that no other thread finds an interface that is served already.
void Carrier::drive(Lock& lock, double until, bool spin) {
  driving_ = true;
  const double begin = now_s();
  double limit = std::min({until, timer_due_, endpoint_.due()});
  if (std::min(timer_due_, endpoint_.due()) < never) limit = std::min(limit, begin + suspended_s);
  if (endpoint_.due() < begin - suspended_s) endpoint_.resume(begin);
  drive_limit_ = limit;
  const int milliseconds =
      limit == never ? -1 : static_cast<int>(std::ceil(std::max(0.0, limit - begin) * 1e3));
  epoll_event events[64];
  int count = 0;
  if (milliseconds == 0) {
    count = ::epoll_wait(epoll_, events, 64, 0);
  } else {
    lock.unlock();
    const bool found =
        spin && spin_.run([&] { return (count = ::epoll_wait(epoll_, events, 64, 0)) > 0; });
    if (!found) count = ::epoll_wait(epoll_, events, 64, milliseconds);
    lock.lock();
  }
  driving_ = false;
  if (closed_) return;
  for (int i = 0; i < count; ++i) serve(events[i].data.u64, events[i].events);
  const double now = now_s();
  if (limit < never && now > std::max(limit, begin) + suspended_s) endpoint_.resume(now);
  run_timers(now);
  flush_busy();
  publish();
}

void Carrier::run() {
  ::pthread_setname_np(::pthread_self(), "wingbeat-mail");
  Lock lock(mutex_);
  while (!closed_) {
    if (waiting_ > 0) {
      background_idle_ = true;
      background_.wait(lock);
      background_idle_ = false;
    } else if (blocked_ == 0 && now_s() < waited_at_ + grace_s) {
      background_.wait_for(lock, std::chrono::duration<double>(grace_s));
    } else {
      background_drives_ = true;
      drive(lock, never, false);
      background_drives_ = false;
      if (waiting_ > 0) changed_.notify_all();
    }
  }
}

template <class Done>
bool Carrier::wait(Lock& lock, double seconds, Done done) {
  if (done()) return true;
  if (closed_) return false;
  const double deadline = now_s() + seconds;
  ++waiting_;
  bool is_done = false;
  do {
    if (!driving_) {
      drive(lock, deadline, true);
      if (waiting_ > 1) changed_.notify_all();
    } else {
      if (background_drives_) signal();  // it hands over
      changed_.wait_for(lock, std::chrono::duration<double>(std::min(deadline - now_s(), far_s)));
    }
    is_done = done();
  } while (!is_done && !closed_ && now_s() < deadline);
  --waiting_;
  waited_at_ = now_s();
  if (waiting_ > 0) {
    changed_.notify_all();  // another one drives
  } else if (background_idle_ || blocked_ > 0) {
    background_.notify_one();
  }
  return is_done;
}

// -- The user's side ----------------------------------------------------------------------------

bool Carrier::post(const Route& route, const PostedPtr& message) {
  const std::lock_guard lock(mutex_);
  if (closed_ || endpoint_.flow(route) == nullptr) return false;
  if (!endpoint_.post(route, message, now_s())) return false;
  settle();
  return true;
}

void Carrier::free(Received& message) {
  const std::lock_guard lock(mutex_);
  endpoint_.free(message, now_s());
  settle();
}

ReceivedPtr Carrier::take(const std::set<std::uint32_t>* of, bool keep) {
  const std::lock_guard lock(mutex_);
  ReceivedPtr message = endpoint_.take(now_s(), of, keep);
  settle();
  return message;
}

bool Carrier::receive(double seconds, std::uint64_t seen, const std::set<std::uint32_t>* of,
                      bool keep, bool interruptible, ReceivedPtr& message) {
  Lock lock(mutex_);
  const bool done = wait(lock, seconds, [&] {
    message = endpoint_.take(now_s(), of, keep);
    return message != nullptr || endpoint_.changes != seen || (interruptible && interrupted_);
  });
  if (interruptible && done) interrupted_ = false;
  settle();
  return done;
}

bool Carrier::wait_arrived(double seconds, std::uint64_t seen,
                           const std::vector<PostedPtr>& messages) {
  Lock lock(mutex_);
  return wait(lock, seconds, [&] {
    return endpoint_.changes != seen ||
           std::all_of(messages.rbegin(), messages.rend(),
                       [](const PostedPtr& each) { return each->arrived.load(); });
  });
}

bool Carrier::wait_room(double seconds, std::uint64_t seen, const Route& route,
                        std::uint64_t bytes) {
  Lock lock(mutex_);
  return wait(lock, seconds, [&] {
    const Flow* flow = endpoint_.flow(route);
    return endpoint_.changes != seen || flow == nullptr ||
           flow->waiting_bytes() + bytes <= flow->window();
  });
}

bool Carrier::wait_heard(double seconds) {
  Lock lock(mutex_);
  return wait(lock, seconds, [&] { return endpoint_.unheard() == nullptr; });
}

void Carrier::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (waiting_ == 0) return;
  signal();
  changed_.notify_all();
}

void Carrier::leave() {
  const std::lock_guard lock(mutex_);
  Header header;
  header.type = Type::leave;
  const double now = now_s();
  for (const auto& [route, link] : links_) {
    const bool gone = endpoint_.left().contains(route.peer) || endpoint_.lost().contains(route.peer);
    if (gone) continue;
    endpoint_.post(route, std::make_shared<Posted>(header, nullptr), now);
    leaving_to_.push_back(route);
  }
  settle();
}

bool Carrier::wait_finished(double seconds) {
  Lock lock(mutex_);
  return wait(lock, seconds, [&] {
    return std::none_of(leaving_to_.begin(), leaving_to_.end(),
                        [&](const Route& each) { return endpoint_.unfinished(each); });
  });
}

std::set<std::uint32_t> Carrier::unfinished() {
  const std::lock_guard lock(mutex_);
  std::set<std::uint32_t> peers;
  for (const Route& route : leaving_to_) {
    const Flow* flow = endpoint_.flow(route);
    if (flow != nullptr && !flow->only_leave()) peers.insert(route.peer);
  }
  return peers;
}

void Carrier::close(double seconds) {
  Lock lock(mutex_);
  if (closed_) return;
  const double deadline = now_s() + seconds;
  leaving_ = true;
  close_listeners({});  // else a peer would connect again
  endpoint_.acknowledge(now_s());
  flush_busy();
  wait(lock, seconds, [&] { return !endpoint_.busy() && blocked_ == 0; });
  std::vector<std::uint64_t> unopened;
  for (const auto& [id, each] : connections_) {
    if (each->open()) {
      ::shutdown(each->fd, SHUT_WR);
    } else {
      unopened.push_back(id);
    }
  }
  for (const std::uint64_t id : unopened) close_connection(id);
  // A socket that is closed with unread bytes would reset the connection, and lose what was sent.
  wait(lock, deadline - now_s(), [&] {
    return std::none_of(connections_.begin(), connections_.end(),
                        [](const auto& each) { return each.second->open(); });
  });
  abandon_locked();
}

void Carrier::abandon() {
  const std::lock_guard lock(mutex_);
  abandon_locked();
}

void Carrier::abandon_locked() {
  if (closed_) return;
  closed_ = true;
  leaving_ = true;
  while (!connections_.empty()) close_connection(connections_.begin()->first);
  close_listeners({});
  endpoint_.abandon();
  publish();
  signal();
  changed_.notify_all();
  background_.notify_all();
}

void Carrier::forget_after_fork() {
  closed_ = true;
  for (const auto& [id, each] : connections_) ::close(std::exchange(each->fd, -1));
  for (auto& [id, each] : listeners_) ::close(std::exchange(each.fd, -1));
  ::close(std::exchange(epoll_, -1));
  ::close(std::exchange(event_, -1));
}

std::vector<PostedPtr> Carrier::released() {
  const std::lock_guard lock(mutex_);
  for (PostedPtr& each : endpoint_.released) kept_.push_back(std::move(each));
  endpoint_.released.clear();
  const auto still = std::partition(kept_.begin(), kept_.end(),
                                    [](const PostedPtr& each) { return each->queued > 0; });
  std::vector<PostedPtr> out(std::make_move_iterator(still), std::make_move_iterator(kept_.end()));
  kept_.erase(still, kept_.end());
  releasable_.store(!kept_.empty(), std::memory_order_release);
  return out;
}

void Carrier::refresh() {
  Lock lock(mutex_);
  if (!driving_ && !closed_) drive(lock, 0.0, false);
}

std::map<std::uint32_t, double> Carrier::unconnected() {
  refresh();
  const std::lock_guard lock(mutex_);
  return endpoint_.unconnected(now_s());
}

std::map<std::string, std::uint64_t> Carrier::refused_connections() {
  const std::lock_guard lock(mutex_);
  return refused_connections_;
}

std::uint64_t Carrier::ended() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

}  // namespace wingbeat::messages
