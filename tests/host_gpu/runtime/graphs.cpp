// Replays of graphs. Nodes without a dependency between them run at the same time, on separate threads that are started
// in random order, because CUDA guarantees only the dependencies.
#include "graphs.h"

#include <algorithm>
#include <random>

namespace host_gpu {

namespace {

class Replay {
 public:
  explicit Replay(const Graph& graph) : graph_(graph), followers_(graph.size()), missing_(graph.size()) {
    for (size_t node = 0; node < graph.size(); ++node) {
      missing_[node] = graph[node].after.size();
      for (const int before : graph[node].after) followers_[before].push_back(static_cast<int>(node));
    }
  }

  void run() {
    std::vector<int> first;
    for (size_t node = 0; node < graph_.size(); ++node) {
      if (missing_[node] == 0) first.push_back(static_cast<int>(node));
    }
    std::unique_lock lock(mutex_);
    start(first);
    changed_.wait(lock, [this] { return done_ == graph_.size(); });
    std::vector<std::thread> threads = std::move(threads_);
    lock.unlock();
    for (auto& thread : threads) thread.join();
  }

 private:
  void start(std::vector<int>& nodes) {
    std::shuffle(nodes.begin(), nodes.end(), random_);
    for (const int node : nodes) threads_.emplace_back([this, node] { finish(node); });
  }

  // Runs a node, and then continues with one of the nodes that have become ready by it.
  void finish(int node) {
    while (node >= 0) {
      graph_[node].work();
      const std::lock_guard lock(mutex_);
      std::vector<int> ready;
      for (const int follower : followers_[node]) {
        if (--missing_[follower] == 0) ready.push_back(follower);
      }
      std::shuffle(ready.begin(), ready.end(), random_);
      node = ready.empty() ? -1 : ready.back();
      if (!ready.empty()) ready.pop_back();
      start(ready);
      ++done_;
      changed_.notify_all();
    }
  }

  const Graph& graph_;
  std::vector<std::vector<int>> followers_;
  std::vector<size_t> missing_;  // the number of nodes that each node still waits for
  std::vector<std::thread> threads_;
  std::mt19937 random_{std::random_device{}()};
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t done_ = 0;
};

// `running` keeps two launches of the same executable graph apart, because in CUDA they never overlap.
struct Executable {
  Graph graph;
  std::mutex running;
};

// A shared pointer, because a graph may be destroyed while it runs.
using Shared = std::shared_ptr<Executable>;

Graph* graph_of(cudaGraph_t handle) {
  return reinterpret_cast<Graph*>(handle);
}

}  // namespace

}  // namespace host_gpu

using namespace host_gpu;

CUDA_FUNCTION cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  auto executable = std::make_shared<Executable>();
  executable->graph = *graph_of(graph);
  *made = reinterpret_cast<cudaGraphExec_t>(new Shared(executable));
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return enqueue(stream, [executable = *reinterpret_cast<Shared*>(graph)] {
    const std::lock_guard lock(executable->running);
    Replay(executable->graph).run();
  });
}

CUDA_FUNCTION cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph_of(graph);
  return cudaSuccess;
}

CUDA_FUNCTION cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Shared*>(graph);
  return cudaSuccess;
}

// Returns only the number of nodes. torch uses it to warn of empty graphs.
CUDA_FUNCTION cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) stop("nodes of graphs are not imitated");
  *count = graph_of(graph)->size();
  return cudaSuccess;
}
