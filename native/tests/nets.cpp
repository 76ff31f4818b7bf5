#include "nets.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "connections.h"
#include "net/cipher.h"
#include "net/coding.h"
#include "net/lane.h"
#include "net/nic.h"
#include "net/ring.h"

namespace nets {

namespace {

using checks::Bytes;
using checks::expect;
using checks::keys_of;
using checks::Medium;
using checks::post;
using checks::socket_pair;
using namespace wingbeat::net;

std::shared_ptr<Nic> started() {
  auto nic = std::make_shared<Nic>("lo");
  nic->start();
  return nic;
}

std::unique_ptr<Stream> stream(int fd, const std::shared_ptr<Rings>& rings) {
  if (rings == nullptr) return std::make_unique<Stream>(fd);
  return std::make_unique<RingStream>(fd, rings);
}

struct Cluster {
  explicit Cluster(int size, Medium medium = Medium::plain) {
    for (int i = 0; i < size; ++i) nics.push_back(started());
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < i; ++j) {
        const auto ends = socket_pair();
        std::shared_ptr<Rings> rings;
        std::shared_ptr<Rings> theirs;
        if (medium == Medium::shared_memory) {
          rings = std::make_shared<Rings>();
          theirs = std::make_shared<Rings>(checks::copies(*rings));
        }
        std::optional<Keys> keys[2];
        if (medium == Medium::encrypted) {
          keys[0] = keys_of(true);
          keys[1] = keys_of(false);
        }
        nics[static_cast<std::size_t>(i)]->add(j, stream(ends[0], rings), keys[0]);
        nics[static_cast<std::size_t>(j)]->add(i, stream(ends[1], theirs), keys[1]);
      }
    }
    for (int i = 0; i < size; ++i) {
      lanes.push_back(std::make_shared<Lane>(
          std::vector<std::shared_ptr<Group>>{world(i)}, std::uint16_t{1},
          std::size_t{128}, std::size_t{4}, 256U, completions, static_cast<std::uint64_t>(i)));
    }
  }

  ~Cluster() {
    for (const auto& lane : lanes) lane->fail();
    std::vector<std::thread> closing;
    for (const auto& nic : nics) closing.emplace_back([nic] { nic->close(5.0); });
    for (auto& each : closing) each.join();
  }

  // The connections of a member of a group, by default of all.
  std::shared_ptr<Group> member(int rank, std::uint64_t id, const std::vector<int>& ranks) {
    return std::make_shared<Group>(nics[static_cast<std::size_t>(rank)], id, ranks);
  }
  std::shared_ptr<Group> world(int rank) {
    std::vector<int> ranks(nics.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return member(rank, 0, ranks);
  }

  std::vector<std::shared_ptr<Nic>> nics;
  std::shared_ptr<Completions> completions = std::make_shared<Completions>();
  std::vector<std::shared_ptr<Lane>> lanes;
};

// A ring's all-reduce with one chunk for each block.
std::shared_ptr<const Program> ring(int rank, int size, std::uint64_t n) {
  auto program = std::make_shared<Program>();
  const auto block = [&](int number) {
    const auto k = static_cast<std::uint64_t>((number % size + size) % size);
    const auto parts = static_cast<std::uint64_t>(size);
    return std::pair{n * k / parts, n * (k + 1) / parts};
  };
  const int next = (rank + 1) % size;
  const int previous = (rank + size - 1) % size;
  std::vector<Transfer> sends;
  for (int round = 0; round < 2 * (size - 1); ++round) {
    const auto tag = static_cast<std::uint32_t>(round);
    const auto out = block(rank - round);
    const auto in = block(rank - round - 1);
    sends.push_back({next, out.first, out.second, tag, false, 0});
    program->receives.push_back({previous, in.first, in.second, tag, round < size - 1, 0});
    program->unlocks.emplace_back();
  }
  program->first.push_back(sends[0]);
  for (std::size_t i = 1; i < sends.size(); ++i) program->unlocks[i - 1].push_back(sends[i]);
  return program;
}

std::shared_ptr<Task> submit(Cluster& cluster, int rank, std::vector<float>& buffer,
                             std::uint64_t number,
                             const std::shared_ptr<const Packing>& packing = nullptr) {
  auto task = std::make_shared<Task>();
  const int size = static_cast<int>(cluster.lanes.size());
  task->program = ring(rank, size, buffer.size());
  task->buffer = reinterpret_cast<std::uint8_t*>(buffer.data());
  task->number = number;
  task->base_tag = static_cast<std::uint32_t>(number) << 8;
  if (packing != nullptr) {
    task->packing = packing;
    const auto parts = static_cast<std::uint64_t>(size);
    const auto k = static_cast<std::uint64_t>((rank + 1) % size);
    task->own_start = buffer.size() * k / parts;
    task->own_stop = buffer.size() * (k + 1) / parts;
  }
  cluster.lanes[static_cast<std::size_t>(rank)]->submit(task);
  return task;
}

void check_sums(Medium medium) {
  for (const int size : {2, 3, 4}) {
    Cluster cluster(size, medium);
    std::uint64_t number = 1;
    for (const std::size_t n : {0U, 1U, 5U, 1000U, 100'003U, 3'000'000U}) {
      for (const auto& packing : {std::shared_ptr<const Packing>(),
                                  std::shared_ptr<const Packing>(
                                      std::make_shared<CastPacking>(Dtype::bfloat16))}) {
        std::vector<std::vector<float>> buffers;
        std::vector<std::shared_ptr<Task>> tasks;
        for (int rank = 0; rank < size; ++rank) {
          buffers.emplace_back(n);
          for (std::size_t i = 0; i < n; ++i) {
            buffers.back()[i] = static_cast<float>((i + static_cast<std::size_t>(rank)) % 16);
          }
        }
        for (int rank = 0; rank < size; ++rank) {
          tasks.push_back(
              submit(cluster, rank, buffers[static_cast<std::size_t>(rank)], number, packing));
        }
        ++number;
        for (const auto& task : tasks) {
          expect(task->wait(20.0, true), "a collective ends");
          expect(!task->failed(), "a collective succeeds");
        }
        for (std::size_t i = 0; i < n; ++i) {
          float sum = 0;
          for (int rank = 0; rank < size; ++rank) {
            sum += static_cast<float>((i + static_cast<std::size_t>(rank)) % 16);
          }
          for (const auto& each : buffers) {
            if (each[i] != sum) throw std::runtime_error("a sum is wrong");
          }
        }
        ++checks::count;
      }
    }
  }
}

// Elements that a frame of another dtype has moved off their alignment.
void check_odd_places(Medium medium) {
  Cluster cluster(2, medium);
  std::uint64_t number = 0;
  for (const std::size_t n : {1U, 100'001U, 1'000'003U}) {
    std::vector<Bytes> bytes(2, Bytes(n, 3));
    std::vector<std::vector<double>> doubles(2, std::vector<double>(n, 0.5));
    std::vector<std::shared_ptr<Task>> tasks;
    for (const Dtype dtype : {Dtype::uint8, Dtype::float64}) {
      ++number;
      for (std::size_t rank = 0; rank < 2; ++rank) {
        auto task = std::make_shared<Task>();
        task->program = ring(static_cast<int>(rank), 2, n);
        task->buffer = bytes[rank].data();
        if (dtype == Dtype::float64) {
          task->buffer = reinterpret_cast<std::uint8_t*>(doubles[rank].data());
        }
        task->dtype = dtype;
        task->number = number;
        task->base_tag = static_cast<std::uint32_t>(number) << 8;
        cluster.lanes[rank]->submit(task);
        tasks.push_back(task);
      }
    }
    for (const auto& task : tasks) expect(task->wait(20.0, true), "a collective ends");
    expect(bytes[0] == Bytes(n, 6) && bytes[1] == bytes[0], "bytes are added");
    expect(doubles[0] == std::vector<double>(n, 1.0) && doubles[1] == doubles[0],
           "doubles are added");
  }
}

// Tasks from two threads at once, and a peer that closes in the middle.
void check_failures(Medium medium) {
  for (int round = 0; round < 10; ++round) {
    Cluster cluster(3, medium);
    std::vector<std::vector<float>> buffers(2, std::vector<float>(2'000'000, 1.0F));
    std::vector<std::shared_ptr<Task>> tasks(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const auto k = static_cast<std::size_t>(rank);
        tasks[k] = submit(cluster, rank, buffers[k], 1);
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    cluster.nics[2]->fail("gone");
    for (auto& each : threads) each.join();
    for (std::size_t rank = 0; rank < 2; ++rank) {
      expect(tasks[rank]->wait(20.0, true), "a failed collective ends");
      expect(tasks[rank]->failed(), "a collective without its peer fails");
      cluster.nics[rank]->fail("lost");  // the next one may wait for this one only
    }
    buffers.clear();  // nothing may access them any more
  }
}

std::shared_ptr<const Coding> mixed_coding(std::uint64_t n) {
  auto coding = std::make_shared<Coding>();
  Region sketch{0, n / 2, wingbeat::net::Codec::sketch};
  sketch.feedback = true;
  Region top{n / 2, n / 2 + n / 8, wingbeat::net::Codec::topk};
  top.density = 0.01;
  Region sketched{top.stop, n - n / 4, wingbeat::net::Codec::topk};
  sketched.density = 0.1;
  top.bits = wingbeat::net::whole_bits;
  const Region half{sketched.stop, n - n / 8, wingbeat::net::Codec::half};
  coding->regions = {sketch, top, sketched, half, {n - n / 8, n}};
  return coding;
}

// Encoded tasks between plain ones: all ranks get the same values, and those that are sent without
// loss the exact sums.
void check_encoded() {
  const int size = 2;  // around a larger ring, each hop would encode again
  Cluster cluster(size);
  for (const std::size_t n : {0U, 8U, 1000U, 700'001U}) {
    std::vector<std::vector<float>> encoded, plain, residuals;
    std::vector<std::shared_ptr<Task>> tasks;
    std::mt19937 random(static_cast<unsigned>(n));
    for (int rank = 0; rank < size; ++rank) {
      encoded.emplace_back(n);
      for (float& each : encoded.back()) each = static_cast<float>(random() % 1000);
      for (std::size_t i = n - n / 8; i < n; ++i) encoded.back()[i] = 1.0F;
      plain.emplace_back(n, 1.0F);
      residuals.emplace_back(n);
    }
    const auto coding = mixed_coding(n);
    for (int rank = 0; rank < size; ++rank) {
      const auto k = static_cast<std::size_t>(rank);
      const auto packing = std::make_shared<EncodedPacking>(coding, residuals[k].data(), 2);
      tasks.push_back(submit(cluster, rank, encoded[k], 2 * n, packing));
      tasks.push_back(submit(cluster, rank, plain[k], 2 * n + 1));
    }
    for (const auto& task : tasks) {
      expect(task->wait(20.0, true), "an encoded collective ends");
      expect(!task->failed(), "an encoded collective succeeds");
    }
    const auto total = static_cast<float>(size);
    for (int rank = 0; rank < size; ++rank) {
      const auto k = static_cast<std::size_t>(rank);
      expect(encoded[k] == encoded[0], "all ranks have the same encoded sum");
      expect(plain[k] == std::vector<float>(n, total), "a sum behind an encoded one is right");
      for (std::size_t i = n - n / 8; i < n; ++i) {
        if (encoded[k][i] != total) throw std::runtime_error("a sum without loss is wrong");
      }
    }
  }
}

// A lane that is failed while its thread encodes, and by several threads.
void check_failures_while_encoding() {
  for (int round = 0; round < 20; ++round) {
    Cluster cluster(2);
    const std::size_t n = 1'000'000;
    std::vector<std::vector<float>> buffers(2, std::vector<float>(n, 1.0F));
    std::vector<std::vector<float>> residuals(2, std::vector<float>(n));
    std::vector<std::shared_ptr<Task>> tasks;
    const auto coding = mixed_coding(n);
    for (std::uint64_t number = 1; number <= 3; ++number) {
      for (int rank = 0; rank < 2; ++rank) {
        const auto k = static_cast<std::size_t>(rank);
        const auto packing = std::make_shared<EncodedPacking>(coding, residuals[k].data(), 1);
        tasks.push_back(submit(cluster, rank, buffers[k], number, packing));
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    std::vector<std::thread> failing;
    for (int i = 0; i < 4; ++i) {
      const auto lane = cluster.lanes[static_cast<std::size_t>(i % 2)];
      failing.emplace_back([lane] { lane->fail(); });
    }
    for (auto& each : failing) each.join();
    buffers.clear();  // nothing may access them any more
    residuals.clear();
    for (const auto& task : tasks) expect(task->wait(0.0, true), "a failed lane ends its tasks");
  }
}

// Top-k payloads that are none fail the lane with the reason.
void check_malformed() {
  Cluster cluster(2);
  const std::size_t n = 10'000;
  std::vector<float> buffer(n);
  auto coding = std::make_shared<Coding>();
  Region top{0, n, wingbeat::net::Codec::topk};
  top.density = 0.01;
  top.bits = whole_bits;
  coding->regions = {top};
  const auto packing = std::make_shared<EncodedPacking>(coding, nullptr, 1);
  const auto task = submit(cluster, 0, buffer, 1, packing);
  const Transfer& expected = task->program->receives[0];
  Bytes junk(packing->bytes(expected.start, expected.stop), 0xff);
  post(*cluster.world(1), true, 0, junk, task->base_tag, 1);
  expect(task->wait(20.0, true) && task->failed(), "a malformed payload fails its task");
  Waiting found;
  expect(cluster.lanes[0]->failure(found), "a malformed payload fails the lane");
  expect(found.peer == 1 && found.reason.find("malformed top-k payload") != std::string::npos,
         "the reason names the payload");
  expect(buffer == std::vector<float>(n), "a malformed payload changes nothing");
}

// The result arrives over another interface than that which the waiting thread serves.
void check_wait_for_another_interface() {
  std::vector<std::shared_ptr<Nic>> own, other;
  for (int link = 0; link < 2; ++link) {
    const auto ends = socket_pair();
    for (auto* nics : {&own, &other}) {
      nics->push_back(started());
      nics->back()->add(0, std::make_unique<Stream>(ends[nics == &own ? 0 : 1]));
    }
  }
  std::vector<std::shared_ptr<Group>> links, others;
  for (const auto& nic : own) links.push_back(std::make_shared<Group>(nic, 0, std::vector{0}));
  for (const auto& nic : other) others.push_back(std::make_shared<Group>(nic, 0, std::vector{0}));
  const auto lane =
      std::make_shared<Lane>(links, std::uint16_t{1}, std::size_t{4}, std::size_t{4}, 256U,
                             std::make_shared<Completions>(), std::uint64_t{1});
  std::vector<float> buffer(2, 0.0F);
  Bytes sent{0, 0, 0x40, 0x40};  // 3
  auto program = std::make_shared<Program>();
  for (std::uint32_t link = 0; link < 2; ++link) {
    program->receives.push_back({0, link, link + 1, link, false, static_cast<int>(link)});
    program->unlocks.emplace_back();
  }
  const auto task = std::make_shared<Task>();
  task->program = program;
  task->buffer = reinterpret_cast<std::uint8_t*>(buffer.data());
  task->number = 1;
  lane->submit(task);
  std::thread peer([&] {
    for (std::uint32_t link = 0; link < 2; ++link) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      post(*others[link], true, 0, sent, link, 1);
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  expect(task->wait(30.0, true), "a collective over two interfaces ends");
  const auto took = std::chrono::steady_clock::now() - begin;
  expect(took < std::chrono::seconds(10), "the waiting thread is interrupted");
  expect(buffer == std::vector<float>({3.0F, 3.0F}), "both halves have arrived");
  peer.join();
  for (const auto* nics : {&own, &other}) {
    for (const auto& nic : *nics) nic->stop();
  }
}

// Many threads wait for collectives of one interface at once, and take its work from each other.
void check_waiting_threads(Medium medium) {
  Cluster cluster(2, medium);
  std::vector<std::vector<std::vector<float>>> buffers(
      2, std::vector<std::vector<float>>(200, std::vector<float>(256, 1.0F)));
  std::atomic<long> ended = 0;
  std::vector<std::thread> threads;
  std::vector<std::vector<std::shared_ptr<Task>>> tasks(2);
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto k = static_cast<std::size_t>(rank);
      for (std::size_t i = 0; i < buffers[k].size(); ++i) {
        tasks[k].push_back(submit(cluster, rank, buffers[k][i], i + 1));
      }
      std::vector<std::thread> waiting;
      for (std::size_t t = 0; t < 4; ++t) {
        waiting.emplace_back([&, k, t] {
          for (std::size_t i = t; i < tasks[k].size(); i += 4) {
            ended += tasks[k][i]->wait(30.0, true) && !tasks[k][i]->failed();
          }
        });
      }
      for (auto& each : waiting) each.join();
    });
  }
  for (auto& each : threads) each.join();
  expect(ended == 400, "every waiting thread sees the end");
}

void end(Group& group, bool failed) {
  Work work;
  group.end(failed, work);
  work.run();
}

State result(const OperationPtr& operation) {
  for (int i = 0; i < 20'000 && operation->state == State::pending; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return operation->state;
}

// Members are numbered in the group, and its messages are not those of the world.
void check_group_members(Medium medium) {
  Cluster cluster(4, medium);
  Bytes in_group(1000, 1), in_world(1000, 2), got_group(1000), got_world(1000);
  const auto sender = cluster.member(3, 7, {1, 3});
  const auto receiver = cluster.member(1, 7, {1, 3});
  const auto sent = post(*sender, true, 0, in_group);
  const auto also = post(*cluster.world(3), true, 1, in_world);
  expect(result(post(*cluster.world(1), false, 3, got_world)) == State::done, "the world receives");
  expect(result(post(*receiver, false, 1, got_group)) == State::done, "a member receives");
  expect(result(sent) == State::done && result(also) == State::done, "both were sent");
  expect(got_group == in_group && got_world == in_world, "neither receives what is the other's");
}

// A group ends while messages larger than a window are sent in it, in both directions.
void check_end_of_group(Medium medium) {
  Cluster cluster(2, medium);
  const auto world = cluster.world(0), other_world = cluster.world(1);
  for (std::uint64_t id = 1; id <= 40; ++id) {
    const bool failed = id % 2 == 0;
    const auto here = cluster.member(0, id, {0, 1}), there = cluster.member(1, id, {0, 1});
    auto large = std::make_unique<Bytes>(20U << 20, 1), second = std::make_unique<Bytes>(*large);
    auto into = std::make_unique<Bytes>(20U << 20), never = std::make_unique<Bytes>(100);
    Bytes small(100, 3), got(100);
    const OperationPtr unfinished[] = {post(*here, true, 1, *large, 1),
                                       post(*here, false, 1, *never, 3)};
    // On a busy machine these may end before the group.
    const OperationPtr others[] = {post(*there, true, 0, *second, 2),
                                   post(*here, false, 1, *into, 2)};
    std::this_thread::sleep_for(std::chrono::microseconds(id * 100));
    end(*here, failed);
    large.reset();  // nothing may access them any more
    into.reset();
    never.reset();
    for (const auto& each : unfinished) {
      expect(result(each) == State::failed, "a group's end fails it");
    }
    for (const auto& each : others) expect(result(each) != State::pending, "nothing is left over");
    expect(result(post(*there, false, 0, got, 9)) == State::failed, "and what is posted later");
    end(*there, false);
    const auto sent = post(*world, true, 1, small);
    expect(result(post(*other_world, false, 0, got)) == State::done, "the world continues");
    expect(result(sent) == State::done && got == small, "and is not affected");
  }
}

// What was sent before a member had opened its group.
void check_early_end_of_group(Medium medium) {
  Cluster cluster(2, medium);
  std::uint64_t id = 1;
  for (const bool failed : {false, true}) {
    Bytes sent(100'000, 5), got(100'000);
    const auto here = cluster.member(0, ++id, {0, 1});
    expect(result(post(*here, true, 1, sent)) == State::done, "a message is sent");
    end(*here, failed);
    Bytes small(1), into(1);  // behind the end
    const auto marker = post(*cluster.world(0), true, 1, small);
    expect(result(post(*cluster.world(1), false, 0, into)) == State::done, "the end has arrived");
    const auto there = cluster.member(1, id, {0, 1});
    const auto received = post(*there, false, 0, got);
    expect(result(received) == (failed ? State::failed : State::done), "only a closed group's");
    expect(failed || got == sent, "message can be received");
    expect(result(post(*there, false, 0, got)) == State::failed, "and no other one");
    expect(result(post(*there, true, 0, got)) == State::failed, "nor sent");
  }
}

// What arrives completely of a group that has ended is what was sent.
void check_messages_of_ended_group(Medium medium) {
  Cluster cluster(2, medium);
  for (std::uint64_t id = 1; id <= 40; ++id) {
    const auto here = cluster.member(0, id, {0, 1}), there = cluster.member(1, id, {0, 1});
    const Bytes expected(200'000, static_cast<std::uint8_t>(id));
    auto sent = std::make_unique<std::vector<Bytes>>(10, expected);
    for (std::uint32_t tag = 0; tag < 10; ++tag) post(*here, true, 1, (*sent)[tag], tag);
    std::this_thread::sleep_for(std::chrono::microseconds(id * 20));
    end(*here, false);
    sent.reset();
    for (std::uint32_t tag = 0; tag < 10; ++tag) {
      Bytes got(expected.size());
      if (result(post(*there, false, 0, got, tag)) != State::done) break;
      expect(got == expected, "a message that arrives is the one that was sent");
    }
    end(*there, false);
  }
}

// Ends that the other side never answers are forgotten, as are messages that it never receives.
void check_many_groups() {
  Cluster cluster(2);
  Bytes bytes(10, 1), got(10);
  for (std::uint64_t id = 1; id < 3 * most_ended_groups; ++id) {
    const auto here = cluster.member(0, id, {0, 1});
    expect(result(post(*here, true, 1, bytes)) == State::done, "a message is sent");
    end(*here, false);
  }
  const auto sent = post(*cluster.world(0), true, 1, bytes);
  expect(result(post(*cluster.world(1), false, 0, got)) == State::done, "the connection is usable");
}

// A peer connects again: what was posted before fails, and a new group uses the new connection.
void check_second_connection() {
  Cluster cluster(2);
  for (std::uint64_t id = 1; id < 20; ++id) {
    Bytes bytes(100, 1), got(100);
    const auto here = cluster.member(0, id, {0, 1});
    const auto pending = post(*here, false, 1, got);
    const auto ends = socket_pair();
    cluster.nics[0]->add(1, std::make_unique<Stream>(ends[0]));
    cluster.nics[1]->add(0, std::make_unique<Stream>(ends[1]));
    expect(result(pending) == State::failed, "a receive from a former connection fails");
    expect(cluster.nics[0]->connected(1), "there is a connection");
    expect(result(post(*here, true, 1, bytes)) == State::failed, "a group has its connections");
    const auto again = cluster.member(0, 100 + id, {0, 1});
    const auto there = cluster.member(1, 100 + id, {0, 1});
    const auto sent = post(*again, true, 1, bytes);
    expect(result(post(*there, false, 0, got)) == State::done, "a new one works");
    expect(result(sent) == State::done && got == bytes, "a new one sends");
  }
}

// Sends bytes in pieces, ends the stream, and closes the interface at its other end.
template <class Between>
void feed(int fd, const Bytes& bytes, std::size_t most_piece, Nic& nic, std::mt19937& random,
          Between between) {
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t length = std::min<std::size_t>(1 + random() % most_piece, bytes.size() - at);
    if (::send(fd, bytes.data() + at, length, MSG_NOSIGNAL) < 0) break;
    at += length;
    between();
  }
  ::shutdown(fd, SHUT_WR);
  nic.close(5.0);
  ::close(fd);
}

// A peer that has the keys and sends malformed frames, and one that has not.
void check_random_bytes(bool encrypted) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto ends = socket_pair();
    const auto nic = started();
    std::optional<Keys> keys;
    std::optional<Cipher> cipher;
    if (encrypted) {
      keys = keys_of(true);
      if (round % 4 > 0) cipher.emplace(keys->receiving.data());
    }
    nic->add(0, std::make_unique<Stream>(ends[0]), keys);
    std::vector<std::shared_ptr<Group>> groups;
    for (std::uint64_t id = 0; id < 3; ++id) {
      groups.push_back(std::make_shared<Group>(nic, id, std::vector<int>{0}));
    }
    Bytes bytes;
    const auto append = [&](const Bytes& plain) {
      Bytes sealed = plain;
      if (cipher) {
        sealed.resize(plain.size() + tag_bytes);
        cipher->seal(plain.data(), plain.size(), sealed.data());
      }
      bytes.insert(bytes.end(), sealed.begin(), sealed.end());
    };
    for (int frame = 0; frame < 20; ++frame) {
      Bytes header(frame_header_bytes);
      FrameHeader fields;
      fields.kind = random() % 4 == 0 ? Kind::credit : random() % 8 == 0 ? Kind::end : Kind::data;
      fields.group = random() % 3;
      fields.channel = static_cast<std::uint16_t>(random() % 3);
      fields.tag = random() % 4;
      fields.length = fields.kind == Kind::data ? random() % 300 : 0;
      fields.total = fields.kind != Kind::data ? 0 : fields.length + random() % 3 * 50;
      fields.offset = random() % 5 == 0 ? random() % 400 : 0;
      fields.consumed = random() % 50 == 0 ? random() : 0;
      write_frame_header(fields, header.data());
      if (random() % 40 == 0) header[random() % frame_header_bytes] ^= 1;
      append(header);
      Bytes payload(fields.length);
      for (auto& each : payload) each = static_cast<std::uint8_t>(random());
      if (!payload.empty()) append(payload);
      if (encrypted && random() % 40 == 0) bytes[random() % bytes.size()] ^= 1;
    }
    std::vector<Bytes> into(12, Bytes(100));
    std::vector<OperationPtr> posted;
    for (std::uint32_t i = 0; i < 12; ++i) {
      posted.push_back(post(*groups[i / 4], false, 0, into[i], i % 4));
    }
    feed(ends[1], bytes, 700, *nic, random, [&] {
      if (random() % 30 == 0) end(*groups[1], random() % 2 == 0);
    });
    for (const auto& operation : posted) {
      expect(operation->state != State::pending, "every receive ends");
      if (encrypted && !cipher) {
        expect(operation->state == State::failed, "nothing is received without the keys");
      }
    }
  }
}

// What a connection of these messages carries.
Bytes stream_of(std::vector<Bytes>& messages) {
  const auto ends = socket_pair();
  const auto nic = started();
  nic->add(0, std::make_unique<Stream>(ends[0]), keys_of(true));
  Group group(nic, 0, std::vector<int>{0});
  std::vector<OperationPtr> posted;
  for (std::uint32_t tag = 0; tag < messages.size(); ++tag) {
    posted.push_back(post(group, true, 0, messages[tag], tag));
  }
  std::thread closing([&] { nic->close(20.0); });
  Bytes stream;
  std::uint8_t piece[4096];
  ssize_t got = 0;
  while ((got = ::recv(ends[1], piece, sizeof piece, 0)) > 0) {
    stream.insert(stream.end(), piece, piece + got);
  }
  ::close(ends[1]);
  closing.join();
  return stream;
}

// A message that nothing receives is passed over, and those behind it arrive.
void check_dropped(bool encrypted) {
  Cluster cluster(2, encrypted ? Medium::encrypted : Medium::plain);
  for (std::uint32_t round = 0; round < 20; ++round) {
    Bytes large(500'000, 1), small(10, 2), into(20), rest(10);
    const auto wrong = post(*cluster.world(1), false, 0, into, 2 * round);
    const auto right = post(*cluster.world(1), false, 0, rest, 2 * round + 1);
    post(*cluster.world(0), true, 1, large, 2 * round);
    const auto sent = post(*cluster.world(0), true, 1, small, 2 * round + 1);
    result(sent);
    result(right);
    expect(wrong->state == State::failed, "a message of another size fails its receive");
    expect(right->state == State::done && rest == small, "the next message arrives");
  }
}

// Somebody between two ends changes, repeats, reorders, removes or adds bytes.
void check_changed_streams() {
  std::mt19937 random(11);
  for (int round = 0; round < 120; ++round) {
    std::vector<Bytes> messages;
    for (const std::size_t length : {0U, 1U, 300U, 300U, 70'000U, 600'000U, 0U, 40U}) {
      messages.emplace_back(length);
      for (auto& each : messages.back()) each = static_cast<std::uint8_t>(random());
    }
    Bytes stream = stream_of(messages);
    const std::size_t at = random() % stream.size();
    const std::size_t frame = frame_header_bytes + tag_bytes;  // of a message without bytes
    switch (round % 6) {
      case 0: break;
      case 1: stream[at] ^= static_cast<std::uint8_t>(1U << (random() % 8)); break;
      case 2: stream.resize(at); break;
      case 3: stream.erase(stream.begin() + static_cast<std::ptrdiff_t>(at)); break;
      case 4: stream.insert(stream.begin(), stream.begin(), stream.begin() + frame); break;
      default: stream.erase(stream.begin(), stream.begin() + frame);
    }
    const auto ends = socket_pair();
    const auto nic = started();
    nic->add(0, std::make_unique<Stream>(ends[0]), keys_of(false));
    Group group(nic, 0, std::vector<int>{0});
    std::vector<Bytes> into;
    std::vector<OperationPtr> posted;
    for (const auto& each : messages) into.emplace_back(each.size());
    const auto receive = [&] {
      for (std::uint32_t tag = 0; tag < into.size(); ++tag) {
        posted.push_back(post(group, false, 0, into[tag], tag));
      }
    };
    if (round % 2 == 0) receive();
    std::thread feeding([&] { feed(ends[1], stream, 300'000, *nic, random, [] {}); });
    if (round % 2 == 1) receive();
    feeding.join();
    std::size_t done = 0;
    for (std::size_t i = 0; i < into.size(); ++i) {
      expect(posted[i]->state != State::pending, "every receive ends");
      if (posted[i]->state != State::done) continue;
      ++done;
      expect(into[i] == messages[i], "what is received is what was sent");
    }
    expect((done == into.size()) == (round % 6 == 0), "a change is noticed");
  }
}

}  // namespace

void check() {
  for (const Medium medium : {Medium::plain, Medium::shared_memory, Medium::encrypted}) {
    if (medium == Medium::encrypted && !can_encrypt()) break;
    check_sums(medium);
    check_odd_places(medium);
    check_failures(medium);
    check_waiting_threads(medium);
    check_group_members(medium);
    check_end_of_group(medium);
    check_messages_of_ended_group(medium);
    check_early_end_of_group(medium);
  }
  for (const bool encrypted : {false, true}) {
    if (encrypted && !can_encrypt()) break;
    check_random_bytes(encrypted);
    check_dropped(encrypted);
    if (encrypted) check_changed_streams();
  }
  check_encoded();
  check_failures_while_encoding();
  check_malformed();
  check_wait_for_another_interface();
  check_many_groups();
  check_second_connection();
}

}  // namespace nets
