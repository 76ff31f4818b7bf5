// All flows of one process: frames in, messages out. No Python, no sockets; time is given.
//
// A route names a flow. Its connection may end and be renewed; the flow goes on. What no member of
// the job sends is dropped and counted by its reason.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "flow.h"

namespace wingbeat::messages {

inline constexpr std::size_t most_classes = 4;

// The peer, this process's interface, and the class, 0 the most urgent.
struct Route {
  std::uint32_t peer = 0;
  std::uint32_t interface = 0;
  std::uint32_t urgency = 0;

  auto operator<=>(const Route&) const = default;
};

// A message that has arrived. `kept`: it was taken and still counts against its window.
struct Received {
  Header header;
  Route route;
  std::unique_ptr<std::uint8_t[]> payload;
  bool kept = false;
};

using ReceivedPtr = std::shared_ptr<Received>;

// A silent peer, and what may not have arrived at it.
struct Lost {
  std::uint32_t interface;
  std::size_t messages;
  std::uint64_t bytes;
};

class Endpoint {
 public:
  // `silence` is `never` if silent peers do not count as lost.
  Endpoint(std::uint32_t number, std::uint64_t session, std::uint64_t window, double silence);

  void add(const Route& route, std::uint64_t peer_session);
  // Removes all state of a peer whose process has exited; releases its messages.
  void remove_peer(std::uint32_t peer);
  // Releases all messages.
  void abandon();

  // A connection of the route begins, at whose one end `introduce` is set, or has ended.
  void connected(const Route& route, bool introduce, double now);
  void disconnected(const Route& route, double now);

  // Queues a message; false if the window has no room.
  bool post(const Route& route, const PostedPtr& message, double now);
  // The frame that is to be sent first, if there is one, and notes that it is sent.
  Frame next(const Route& route, double now);
  // The routes for which `next` may have a frame, once.
  std::vector<Route> take_busy();
  bool busy() const { return !busy_.empty(); }

  // Processes a frame that came on the connection of this route.
  void accept(const Route& route, Header header, std::unique_ptr<std::uint8_t[]> payload,
              double now);

  // The oldest message of the most urgent class that has one; of these peers, if given.
  ReceivedPtr take(double now, const std::set<std::uint32_t>* of = nullptr, bool keep = false);
  // Returns a kept message's bytes to the sender's window, once.
  void free(Received& message, double now);
  std::size_t waiting() const { return waiting_; }

  // When `tick` has something to do, if nothing arrives before.
  double due() const { return due_; }
  void tick(double now);
  // Ignores silence before `now`: this process was suspended until then.
  void resume(double now);
  // Has all flows acknowledge at once, because this process leaves.
  void acknowledge(double now);

  const Flow* flow(const Route& route) const;
  const std::map<std::uint32_t, Lost>& lost() const { return lost_; }
  const std::set<std::uint32_t>& left() const { return left_; }
  // Peers without any connection, with the seconds since then.
  std::map<std::uint32_t, double> unconnected(double now) const;
  // The first route over which no frame of its peer has arrived; null if there is none.
  const Route* unheard() const;
  // Whether a message to these routes' peers has not arrived; the last word to a peer that has
  // left does not count.
  bool unfinished(const Route& route) const;
  std::uint64_t repeated() const;
  bool left_on_all(std::uint32_t peer) const;

  std::map<std::string, std::uint64_t> refused;  // dropped frames by reason
  std::uint64_t changes = 0;                     // counts what a waiting thread may react to
  std::vector<PostedPtr> released;               // messages that have arrived

 private:
  struct Link {
    Flow flow;
    bool busy = false;
    bool renewed = false;  // whether a hello of the peer is awaited on a new connection
    double down = never;   // when the connection was lost
  };

  void mark_busy(const Route& route, Link& link);
  void schedule(const Link& link, double now) { due_ = std::min(due_, link.flow.due(now)); }

  std::uint32_t number_;
  std::uint64_t session_;
  std::uint64_t window_;
  double silence_;
  std::map<Route, Link> links_;
  std::vector<Route> busy_;
  std::array<std::deque<ReceivedPtr>, most_classes> inbox_;
  std::size_t waiting_ = 0;
  std::map<std::uint32_t, Lost> lost_;
  std::set<std::uint32_t> left_;
  double due_ = never;
};

}  // namespace wingbeat::messages
