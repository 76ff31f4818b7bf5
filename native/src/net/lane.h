// Runs programs of collectives in the order of submission, as wingbeat/collectives/program.py does:
// its `Machine` is the reference, and both send the same chunks in the same order.
//
// A lane advances when it is given a task and whenever one of its transfers has finished, in the
// thread where that happens. While it has tasks whose packing is slow, a thread of its own advances
// it instead, so that the interface's thread serves other lanes meanwhile.
//
// Locks: the lane's mutex guards its state. It is not held while a slow packing runs: then only the
// lane's thread changes tasks that have begun, and `fail` waits for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "group.h"

namespace wingbeat::net {

// A chunk to or from a peer: elements [start, stop) of the buffer.
struct Transfer {
  int peer = 0;
  std::uint64_t start = 0;
  std::uint64_t stop = 0;
  std::uint32_t tag = 0;
  bool reduce = false;
  int link = 0;
  bool near = false;  // within a host: elements are sent as they are in the buffer

  std::uint64_t size() const { return stop - start; }
};

// `first` may be sent at once, and `unlocks[i]` once `receives[i]` was applied.
struct Program : std::enable_shared_from_this<Program> {
  std::vector<Transfer> first;
  std::vector<Transfer> receives;
  std::vector<std::vector<Transfer>> unlocks;
};

// The form in which chunks are sent, if not as they are in the buffer.
class Packing : public std::enable_shared_from_this<Packing> {
 public:
  virtual ~Packing() = default;
  virtual std::uint64_t bytes(std::uint64_t start, std::uint64_t stop) const = 0;
  // Writes the chunk into `out`. `result`: it is final, and the buffer is rounded to what is sent.
  virtual void pack(std::uint8_t* buffer, std::uint64_t start, std::uint64_t stop,
                    std::uint8_t* out, bool result) const = 0;
  // Returns what is wrong with the chunk, or null.
  virtual const char* unpack(const std::uint8_t* chunk, std::uint8_t* buffer, std::uint64_t start,
                             std::uint64_t stop, bool add) const = 0;
  // Whether a chunk takes so long that other lanes should not wait for it.
  virtual bool slow() const = 0;
};

// float32 elements sent as float16 or bfloat16.
class CastPacking : public Packing {
 public:
  explicit CastPacking(Dtype to) : to_(to) {}
  std::uint64_t bytes(std::uint64_t start, std::uint64_t stop) const override;
  void pack(std::uint8_t* buffer, std::uint64_t start, std::uint64_t stop, std::uint8_t* out,
            bool result) const override;
  const char* unpack(const std::uint8_t* chunk, std::uint8_t* buffer, std::uint64_t start,
                     std::uint64_t stop, bool add) const override;
  bool slow() const override { return false; }

 private:
  Dtype to_;
};

// Receives the numbers of tasks that have ended and asked for it, for a thread that waits for them.
class Completions : public std::enable_shared_from_this<Completions> {
 public:
  void push(std::uint64_t number);
  // Waits for numbers and returns them; empty after `close`.
  std::vector<std::uint64_t> wait();
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> numbers_;
  bool closed_ = false;
};

// A collective on one lane.
class Task : public std::enable_shared_from_this<Task> {
 public:
  // Waits up to `seconds` for the result or, with `sent` too, for the end of all transfers.
  bool wait(double seconds, bool sent);
  bool done() const { return done_; }
  bool failed() const { return failed_; }
  // Has the number reported when the task is done; false if it is done.
  bool report();

  std::shared_ptr<const Program> program;
  std::shared_ptr<Task> after;  // the previous collective on this buffer
  std::uint8_t* buffer = nullptr;
  Dtype dtype = Dtype::float32;
  std::shared_ptr<const Packing> packing;
  std::uint64_t own_start = 0, own_stop = 0;  // with a packing: the block of this worker
  std::uint32_t base_tag = 0;
  std::uint64_t number = 0;
  // A sum of small buffers: the program gathers them as rows, and the result is the sum of the rows
  // in the order of ranks. 0: the program works on the buffer.
  std::uint32_t rows = 0;
  std::uint32_t own_row = 0;
  std::uint64_t row_elements = 0;

  std::uint64_t begin_ns = 0, received_ns = 0;  // of CLOCK_MONOTONIC

 private:
  friend class Lane;
  struct Held {
    std::int64_t needs;  // the receive of `after` that must have been applied; -1: none
    const Transfer* transfer;
  };
  struct Sent {
    OperationPtr operation;
    const Transfer* transfer;
  };

  void prepare(ScratchPool& pool);
  void sum_rows();

  bool slow() const { return packing != nullptr && packing->slow(); }
  const Packing* packing_of(const Transfer& transfer) const {
    return transfer.near ? nullptr : packing.get();
  }
  bool complete() const { return applied_ == program->receives.size(); }
  // Marks the result as readable and, with `sent`, the task as done.
  void end(bool failed, bool sent, Completions& completions);

  // Guarded by the lane.
  std::uint8_t* memory_ = nullptr;  // that of the program: the buffer, or the rows
  std::unique_ptr<std::uint8_t[]> gathered_;
  std::size_t applied_ = 0;
  std::size_t sent_ = 0;  // chunks of which the transmission has ended
  std::size_t unsent_ = 0;
  bool in_order_ = true;  // whether all posted receives use one connection
  std::deque<Held> held_;
  std::deque<OperationPtr> coming_;
  std::deque<Sent> sends_;
  std::map<std::uint64_t, OperationPtr> results_;

  std::shared_ptr<Nic> nic_;  // of the first receive; set when the task is submitted
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> received_ = false, done_ = false, failed_ = false;
  bool reported_ = false;
};

// The transfer for which a lane waits, or at which it failed.
struct Waiting {
  std::uint64_t number = 0;  // of the task
  std::uint64_t index = 0;
  int peer = 0;
  int link = 0;
  double seconds = 0.0;
  std::string reason;
};

class Lane : public Owner, public std::enable_shared_from_this<Lane> {
 public:
  Lane(std::vector<std::shared_ptr<Group>> links, std::uint16_t channel, std::size_t ahead,
       std::size_t depth, std::uint32_t chunks_per_tag, std::shared_ptr<Completions> completions,
       std::uint64_t number);

  // Queues a task; it fails if the lane has failed.
  void submit(const std::shared_ptr<Task>& task);
  void progress(Work& work) override;
  // Fails all tasks; no memory of theirs is accessed afterwards.
  void fail();
  // Whether it waits for a peer, and for which.
  bool waiting(Waiting& found);
  // The transfer at which it failed; false if it has not failed, or by `fail`.
  bool failure(Waiting& found);

 private:
  void step_or_wake(Work& work);
  void run_thread();
  void step(Work& work);
  void begin_more(Work& work);
  bool advance(const std::shared_ptr<Task>& task, Work& work);
  void release(Task& task, Work& work);
  OperationPtr operation(const Task& task, const Transfer& transfer);
  void post_receive(Task& task, const Transfer& transfer, Work& work);
  void send(Task& task, const Transfer& transfer, Work& work);
  const char* apply(Task& task, const Transfer& transfer, Operation& operation, Work& work);
  void pack(Task& task, const Transfer& transfer, Operation& operation, bool result, Work& work);
  template <class Function>
  void run_unlocked(Function run, Work& work);
  void finish_sent();
  bool fail_if_lost(Work& work);
  void fail_at(const Task& task, std::uint64_t index, const Transfer& transfer,
               const std::string& reason, Work& work);
  void end_all(Work& work);

  const std::vector<std::shared_ptr<Group>> links_;
  const std::uint16_t channel_;
  const std::size_t ahead_, depth_;
  const std::uint32_t chunks_per_tag_;
  const std::shared_ptr<Completions> completions_;
  const std::uint64_t number_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_, active_, draining_;
  std::size_t slow_tasks_ = 0;  // queued or active
  bool has_thread_ = false;
  bool awake_ = false;     // whether the thread has something to do
  bool unlocked_ = false;  // whether the thread runs a packing
  bool stopping_ = false;  // whether `fail` waits for the thread
  bool failed_ = false;
  bool has_failure_ = false;
  Waiting failure_;
  // The receive that is awaited, and since when.
  std::uint64_t awaited_number_ = 0, awaited_index_ = 0, awaited_ns_ = 0;
};

}  // namespace wingbeat::net
