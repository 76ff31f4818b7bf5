// Carries the frames of one process over TCP connections of its own, one for each route.
//
// The process with the lower number connects, and connects again when a connection ends. Both ends
// prove that they have the key of the pair before any other byte is used; then frames follow, each
// sealed if the options say so. docs/developers/messages.md lists the bytes.
//
// One mutex guards everything; it is held during system calls, which never block and move at most
// `most_turn_bytes`. One thread at a time waits for events ("drives"): a thread that waits for a
// message drives itself, so no other thread has to wake it, and the carrier's own thread drives
// while no other does. Payloads of posted messages are not accessed once `released` returns them.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "endpoint.h"
#include "net/cipher.h"
#include "sha256.h"
#include "spin.h"

namespace wingbeat::messages {

struct Options {
  std::uint32_t number = 0;
  std::uint64_t session = 0;
  std::uint64_t message = 0;  // most bytes of a payload
  std::uint64_t window = 0;
  double silence = never;
  double heartbeat = 60.0;  // seconds without a reply after which a connection ends
  bool encrypted = false;
};

inline constexpr std::size_t most_header_bytes = header_fixed + span_bytes * most_spans;

class Carrier : public std::enable_shared_from_this<Carrier> {
 public:
  explicit Carrier(const Options& options);
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;
  ~Carrier();

  // Listens for the connections of one interface and class; returns the port. Throws
  // std::system_error.
  int listen(std::uint32_t interface, std::uint32_t urgency, const std::string& address, int tos);
  // Stops listening on all other interfaces.
  void close_listeners_except(const std::set<std::uint32_t>& interfaces);
  // Starts the thread, which keeps this object until it is closed.
  void start();

  // `key` is shared with the peer alone.
  void allow(std::uint32_t peer, std::uint64_t session, const Digest& key);
  // Adds a flow. The lower number connects to the peer's interface `theirs` at this address.
  void add_route(const Route& route, const std::string& address, int port, std::uint32_t theirs);
  void remove_peer(std::uint32_t peer);

  std::uint64_t largest() const { return options_.message; }
  // Queues a message; false if its window has no room.
  bool post(const Route& route, const PostedPtr& message);
  void free(Received& message);
  // A message that has arrived.
  ReceivedPtr take(const std::set<std::uint32_t>* of, bool keep);

  // Each waits for up to `seconds`, but not if `changes` differs from `seen`.
  bool receive(double seconds, std::uint64_t seen, const std::set<std::uint32_t>* of, bool keep,
               bool interruptible, ReceivedPtr& message);
  bool wait_arrived(double seconds, std::uint64_t seen, const std::vector<PostedPtr>& messages);
  bool wait_room(double seconds, std::uint64_t seen, const Route& route, std::uint64_t bytes);
  bool wait_heard(double seconds);
  // Ends the current or next interruptible wait.
  void interrupt();

  // Posts the last message of each flow.
  void leave();
  // Waits until all messages have arrived.
  bool wait_finished(double seconds);
  // Peers at which messages have not arrived.
  std::set<std::uint32_t> unfinished();
  // Sends what is queued, waits until the peers have read it, and closes the connections.
  void close(double seconds);
  // Closes the connections at once and releases all messages.
  void abandon();
  // Closes a forked process's copies of the sockets; the thread does not exist there. No thread
  // holds the lock when this process forks.
  void forget_after_fork();

  // Messages that have arrived or were abandoned; `releasable` tells whether there are any.
  std::vector<PostedPtr> released();
  bool releasable() const { return releasable_.load(std::memory_order_acquire); }
  // Runs `read` while the endpoint does not change.
  template <class Read>
  auto inspect(Read read) {
    const std::lock_guard lock(mutex_);
    return read(static_cast<const Endpoint&>(endpoint_));
  }
  // Reads what has arrived, so that `inspect` and `take` show the present.
  void refresh();
  // Peers without any connection, with the seconds since then.
  std::map<std::uint32_t, double> unconnected();
  std::uint64_t changes() const { return changes_.load(std::memory_order_acquire); }
  // Whether a peer is lost or has left.
  bool troubled() const { return troubled_.load(std::memory_order_acquire); }
  std::map<std::string, std::uint64_t> refused_connections();
  // Connections that have ended, including renewed ones.
  std::uint64_t ended();
  bool closed() const { return closed_.load(std::memory_order_acquire); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  enum class Stage : std::uint8_t {
    connecting,    // the system connects
    challenge,     // reads the nonce of the accepting end
    confirmation,  // reads the tag of the accepting end
    answer,        // reads the identity and the tag of the connecting end
    header,
    ranges,
    payload,
  };

  struct Listener {
    int fd = -1;
    std::uint32_t interface = 0, urgency = 0;
    int tos = 0;
  };

  struct Out {
    std::vector<std::uint8_t> head;  // with the payload if that is small
    PostedPtr message;               // null: nothing follows the head
    std::size_t sent = 0;

    std::size_t bytes() const {
      return head.size() + (message == nullptr ? 0 : message->header.length);
    }
  };

  struct Connection {
    std::uint64_t id = 0;
    int fd = -1;
    Stage stage = Stage::answer;
    bool incoming = false;
    std::string from;      // the address of the connecting end
    bool blocked = false;  // whether it waits until the socket accepts bytes
    Route route;
    std::uint32_t theirs = 0;  // the accepting end's interface
    double deadline = 0;       // of the handshake
    std::string transcript;    // what the handshake's tags are over

    // Reading: the piece in progress has `want` bytes, its tag included.
    std::uint8_t* target = nullptr;
    std::size_t want = 0, filled = 0;
    std::array<std::uint8_t, most_header_bytes + net::tag_bytes> head;
    Header header;
    std::unique_ptr<std::uint8_t[]> payload;
    std::size_t payload_done = 0;
    std::optional<net::Cipher> opener;

    // Writing.
    std::deque<Out> out;
    std::size_t out_bytes = 0;
    std::optional<net::Cipher> sealer;
    std::unique_ptr<std::uint8_t[]> sealed;
    std::size_t sealed_begin = 0, sealed_end = 0;
    PostedPtr sealing;  // whose payload from `sealing_at` on is to be sealed
    std::size_t sealing_at = 0;

    bool open() const { return stage >= Stage::header; }
    bool stranger() const { return incoming && !open(); }
  };

  struct Address {
    sockaddr_storage storage{};
    socklen_t size = 0;

    Address() = default;
    // Throws std::system_error.
    Address(const std::string& host, int port);
    int family() const { return storage.ss_family; }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  };

  struct Link {
    Address address;  // of the peer
    std::uint32_t theirs = 0;
    bool dials = false;
    std::uint64_t connection = 0;  // 0: none
    double retry_at = 0, retry_after = 0;
    double down_at = -never;  // when the last open connection ended
  };

  struct Peer {
    std::uint64_t session;
    Digest key;
  };

  template <class Done>
  bool wait(Lock& lock, double seconds, Done done);
  void drive(Lock& lock, double until, bool spin);
  void run();
  void signal();
  void publish();
  void settle();

  void serve(std::uint64_t id, std::uint32_t events);
  void run_timers(double now);
  void flush_busy();

  void accept_from(std::uint64_t id);
  bool make_room_for_stranger();
  void dial(const Route& route, Link& link, double now);
  bool configure(int fd, int tos) const;
  Connection& add_connection(int fd, bool incoming, Stage stage);
  void expect(Connection& connection, Stage stage, std::uint8_t* target, std::size_t bytes);
  bool send_now(const Connection& connection, const std::string& bytes);
  const char* begin_challenge(Connection& connection);
  const char* end_piece(Connection& connection);
  const char* read_challenge(Connection& connection);
  const char* read_answer(Connection& connection);
  const char* read_confirmation(Connection& connection);
  void establish(Connection& connection, const Digest& key);
  const char* read_header_piece(Connection& connection);
  const char* begin_payload(Connection& connection);
  void expect_payload(Connection& connection);
  void deliver(Connection& connection);

  void read(Connection& connection);
  void write(Connection& connection);
  void gather(Connection& connection, double now);
  void seal_more(Connection& connection, double now);
  void seal(Connection& connection, const std::uint8_t* data, std::size_t bytes);
  void block(Connection& connection, bool blocked);
  void fail(Connection& connection, const char* reason);
  void close_connection(std::uint64_t id);
  void close_listeners(const std::set<std::uint32_t>& except);
  void abandon_locked();

  struct All;  // the carriers of this process
  static All& all();

  const Options options_;
  std::atomic<std::uint64_t> changes_{0};
  std::atomic<bool> troubled_{false}, releasable_{false}, closed_{false};

  std::mutex mutex_;
  std::condition_variable changed_;     // for threads that wait and do not drive
  std::condition_variable background_;  // for the carrier's thread
  Endpoint endpoint_;
  std::map<std::uint32_t, Peer> peers_;
  std::map<Route, Link> links_;
  std::map<std::uint64_t, Listener> listeners_;
  std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::uint64_t next_id_ = 1;
  std::map<std::string, std::uint64_t> refused_connections_;
  std::uint64_t ended_ = 0;
  std::unique_ptr<std::uint8_t[]> staging_;
  std::vector<Route> leaving_to_;
  std::vector<PostedPtr> kept_;  // have arrived, and are still queued once more

  int epoll_ = -1, event_ = -1;
  double timer_due_ = never;
  double drive_limit_ = never;  // until when the driving thread waits
  Spin spin_;                   // used by the driving thread
  bool accepting_ = true;  // false: no descriptor was free
  int blocked_ = 0;        // connections that wait until their sockets accept bytes
  int waiting_ = 0;        // threads in `wait`
  bool driving_ = false, background_drives_ = false, background_idle_ = false;
  double waited_at_ = -never;  // when a thread last left `wait`
  bool interrupted_ = false, leaving_ = false;
};

}  // namespace wingbeat::messages
