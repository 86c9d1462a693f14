// Trains a small packed transformer with SequenceBalancer, in C++ alone: each rank is a thread that draws sequences of
// its own. Ends with status 1 unless the gradients equal those of one process that has all sequences.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>

#include "knapformer/torch/balancer.h"
#include "thread_group.h"

namespace {

constexpr int64_t kWidth = 32, kHeads = 4, kNumBlocks = 2;
constexpr double kLearningRate = 0.05;
const std::vector<std::vector<int64_t>> kLengths = {{90, 7}, {12}, {5, 30}, {}};  // tokens, by rank

/// Softmax attention within each of the packed sequences.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& seq_lens) {
  std::vector<at::Tensor> outputs;
  int64_t first = 0;
  for (int64_t i = 0; i < seq_lens.numel(); ++i) {
    const int64_t length = seq_lens[i].item<int64_t>();
    const auto rows = [&](const at::Tensor& t) { return t.narrow(0, first, length).transpose(0, 1); };
    const at::Tensor weights =
        at::softmax(at::matmul(rows(q), rows(k).transpose(1, 2)) / std::sqrt(double(q.size(2))), -1);
    outputs.push_back(at::matmul(weights, rows(v)).transpose(0, 1));
    first += length;
  }
  return outputs.empty() ? q * 1 : at::cat(outputs);
}

using Attention = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

struct Model {
  std::vector<at::Tensor> parameters;  // of each block: q, k, v, out (kWidth, kWidth); up (kWidth, 4 kWidth); down

  Model() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto parameter = [&](int64_t rows, int64_t columns) {
      at::Tensor weight = at::randn({rows, columns}, generator, at::TensorOptions().dtype(at::kDouble)) * 0.1;
      parameters.push_back(weight.set_requires_grad(true));
    };
    for (int64_t block = 0; block < kNumBlocks; ++block) {
      for (int i = 0; i < 4; ++i) parameter(kWidth, kWidth);
      parameter(kWidth, 4 * kWidth);
      parameter(4 * kWidth, kWidth);
    }
  }

  at::Tensor forward(at::Tensor h, const Attention& attention) const {
    for (size_t p = 0; p < parameters.size(); p += 6) {
      const at::Tensor x = at::layer_norm(h, {kWidth});
      const auto heads = [&](size_t i) { return at::matmul(x, parameters[p + i]).view({-1, kHeads, kWidth / kHeads}); };
      h = h + at::matmul(attention(heads(0), heads(1), heads(2)).flatten(1), parameters[p + 3]);
      h = h + at::matmul(at::gelu(at::matmul(at::layer_norm(h, {kWidth}), parameters[p + 4])), parameters[p + 5]);
    }
    return h;
  }
};

std::vector<at::Tensor> gradients(const at::Tensor& loss, const Model& model) {
  return torch::autograd::grad({loss}, model.parameters, {}, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

/// Tokens of a rank in a step, the same wherever they are drawn. The model learns to return them rolled by one channel.
at::Tensor tokens_of(int64_t rank, int64_t step) {
  int64_t count = 0;
  for (const int64_t length : kLengths[static_cast<size_t>(rank)]) count += length;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * step + rank));
  return at::randn({count, kWidth}, generator, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace

int main() {
  constexpr int64_t kNumRanks = 4, kNumSteps = 3;
  const std::vector<int64_t> all_ranks = {0, 1, 2, 3};
  ThreadGroups groups;
  Model model;  // one copy of the weights serves all ranks, as they are updated alike
  double worst = 0;

  for (int64_t step = 0; step < kNumSteps; ++step) {
    // Each rank: plan, route, blocks on its share of the tokens, back, loss on its own tokens, gradients.
    std::vector<std::vector<at::Tensor>> of_rank(kNumRanks);
    std::vector<double> losses(kNumRanks);
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < kNumRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        knapformer::SequenceBalancer balancer("g4/2/1n1", {}, groups.group(all_ranks, rank),
                                              [&](const std::vector<int64_t>& bag) { return groups.group(bag, rank); });
        balancer.plan_routing(kLengths[static_cast<size_t>(rank)], kWidth);
        const at::Tensor x = tokens_of(rank, step);
        const knapformer::Step moves = balancer.current();
        const auto routed = moves.route(x);
        const at::Tensor h = model.forward(routed.x, [&](const auto& q, const auto& k, const auto& v) {
          return moves.attention(q, k, v, {[](const auto& q, const auto& k, const auto& v, const auto& rows) {
                                   return attend(q, k, v, rows.query_lens);
                                 }});
        });
        const at::Tensor loss = (moves.reverse_route(h) - x.roll(1, 1)).square().sum();
        losses[static_cast<size_t>(rank)] = loss.item<double>();
        of_rank[static_cast<size_t>(rank)] = gradients(loss, model);
      });
    }
    for (std::thread& rank : ranks) rank.join();

    // One process with the sequences of all ranks.
    std::vector<at::Tensor> tokens;
    std::vector<int64_t> lengths;
    for (int64_t rank = 0; rank < kNumRanks; ++rank) {
      tokens.push_back(tokens_of(rank, step));
      const auto& own = kLengths[static_cast<size_t>(rank)];
      lengths.insert(lengths.end(), own.begin(), own.end());
    }
    const at::Tensor x = at::cat(tokens), seq_lens = at::tensor(lengths);
    const at::Tensor h =
        model.forward(x, [&](const auto& q, const auto& k, const auto& v) { return attend(q, k, v, seq_lens); });
    const std::vector<at::Tensor> expected = gradients((h - x.roll(1, 1)).square().sum(), model);

    const at::NoGradGuard no_grad;
    for (size_t p = 0; p < model.parameters.size(); ++p) {
      at::Tensor sum = at::zeros_like(model.parameters[p]);  // an all-reduce, where ranks are processes
      for (const auto& gradient : of_rank) {
        if (gradient[p].defined()) sum += gradient[p];
      }
      worst = std::max(worst, ((sum - expected[p]).abs().max() / expected[p].abs().max()).item<double>());
      model.parameters[p] -= kLearningRate / static_cast<double>(x.size(0)) * sum;
    }
    double loss = 0;
    for (const double part : losses) loss += part;
    std::printf("step %lld: loss %.6f\n", static_cast<long long>(step), loss / static_cast<double>(x.numel()));
  }
  std::printf("gradients differ from those of one process by at most %.1e\n", worst);
  return worst < 1e-10 ? 0 : 1;
}
