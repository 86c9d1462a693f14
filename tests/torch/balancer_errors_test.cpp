// A mistake on one rank is an error on all, soon: with the argument, what came, and what was expected.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/balancer.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

using namespace std::chrono_literals;
using testing::describe;
using testing::InProcessWorld;

// Far apart: a busy machine is slow, but a rank that waits for the timeout is slower.
constexpr std::chrono::seconds kGroupTimeout = 60s, kSoon = 30s;

class Ranks {
 public:
  explicit Ranks(int32_t num_ranks) : world_(num_ranks, kGroupTimeout) {}

  /// Messages by rank. Fails where one raised nothing, or not soon.
  std::vector<std::string> all_raise(const std::function<void(int32_t)>& body) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::string> messages;
    for (const auto& error : world_.run(body)) {
      messages.push_back(describe(error));
      EXPECT_NE(messages.back(), "") << "rank " << messages.size() - 1;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
    return messages;
  }

  std::unique_ptr<SequenceBalancer> balancer(int32_t rank, const std::string& topology, BalancerOptions options = {}) {
    return std::make_unique<SequenceBalancer>(
        topology, std::move(options), world_.all(rank),
        [this, rank](const std::vector<int64_t>& ranks) { return world_.group(ranks, rank); });
  }

  InProcessWorld& world() { return world_; }

 private:
  InProcessWorld world_;
};

void expect_part(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' lacks '" << part << "'";
}

/// One rank of two errs after steps of agreement; both must raise with these words, the other one with the rank's name.
struct Mistake {
  std::string name;
  std::function<void(SequenceBalancer&)> call;       // on rank 1, instead of ...
  std::function<void(SequenceBalancer&)> rest_call;  // ... this on the others
  std::string kind;
  std::string words;
};

void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

at::Tensor x_of(const SequenceBalancer& balancer, at::ScalarType dtype = at::kFloat) {
  return at::zeros({balancer.plan().tokens_before()[static_cast<size_t>(balancer.rank())], 4}, dtype);
}

std::vector<Mistake> mistakes() {
  const auto route = [](SequenceBalancer& b) { b.route(x_of(b), {x_of(b, at::kLong)}, {}); };
  const auto plan = [](SequenceBalancer& b) { b.plan_routing(std::vector<int64_t>{3, 4}, 8); };
  const auto routed = [](SequenceBalancer& b) { return b.route(x_of(b), {x_of(b, at::kLong)}, {}).x; };
  const auto attention = [routed](SequenceBalancer& b) {
    const at::Tensor heads = routed(b).view({-1, 2, 2});
    b.pre_attn(heads, heads, heads);
  };
  return {
      {"x_rows", [](SequenceBalancer& b) { b.route(at::zeros({5, 4})); }, route, "ArgumentError",
       "x: got 5 rows (shape [5, 4]), expected 7 rows"},
      {"x_dtype", [](SequenceBalancer& b) { b.route(x_of(b, at::kDouble), {x_of(b, at::kLong)}, {}); }, route,
       "ArgumentError", "Double (rows, 4) on cpu"},
      {"x_width", [](SequenceBalancer& b) { b.route(x_of(b).narrow(1, 0, 3), {x_of(b, at::kLong)}, {}); }, route,
       "ArgumentError", "Float (rows, 3) on cpu"},
      {"x_grad", [](SequenceBalancer& b) { b.route(x_of(b).set_requires_grad(true), {x_of(b, at::kLong)}, {}); }, route,
       "ArgumentError", "x.requires_grad: got "},
      {"x_device", [](SequenceBalancer& b) { b.route(x_of(b), {x_of(b).to(at::kMeta)}, {}); }, route, "ArgumentError",
       "features[0]: got meta, expected cpu, the device of x"},
      {"feature_missing", [](SequenceBalancer& b) { b.route(x_of(b)); }, route, "ArgumentError", "features[0]: got "},
      {"feature_rows", [](SequenceBalancer& b) { b.route(x_of(b), {at::zeros({2})}, {}); }, route, "ArgumentError",
       "features[0]: got 2 rows (shape [2]), expected 7 rows"},
      {"side_rows", [](SequenceBalancer& b) { b.route(x_of(b), {x_of(b, at::kLong)}, {at::zeros({3, 1})}); }, route,
       "ArgumentError",
       "sequence_features[0]: got 3 rows (shape [3, 1]), expected 2 rows, one for each sequence of this rank"},
      {"reverse_rows",
       [routed](SequenceBalancer& b) {
         routed(b);
         b.reverse_route(at::zeros({1, 4}));
       },
       [routed](SequenceBalancer& b) { b.reverse_route(routed(b)); }, "ArgumentError", "x: got 1 rows"},
      {"other_call", [](SequenceBalancer& b) { b.reverse_route(at::zeros({7, 4})); }, route, "StateError",
       "call: got "},
      {"no_call", [plan](SequenceBalancer& b) { plan(b); }, route, "StateError", "call: got "},
      {"k_heads",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).view({-1, 2, 2});
         b.pre_attn(h, h.narrow(1, 0, 1), h);
       },
       attention, "ArgumentError", "v: got 2 heads, expected 1 heads, as k has"},
      {"kv_heads",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).view({-1, 4, 1});
         b.pre_attn(h, h.narrow(1, 0, 3), h.narrow(1, 0, 3));
       },
       attention, "ArgumentError", "k: got 3 heads, expected a divisor of q's 4 heads"},
      {"no_heads",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).view({-1, 4, 1}).narrow(1, 0, 0);
         b.pre_attn(h, h, h);
       },
       attention, "ArgumentError", "q: got 0 heads, expected at least 1 head"},
      {"q_heads",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).view({-1, 4, 1});
         b.pre_attn(h, h, h);
       },
       attention, "ArgumentError", "heads: got "},
      {"q_flat",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).flatten();
         b.pre_attn(h, h, h);
       },
       attention, "ArgumentError", "q: got a tensor of shape "},
      {"q_of_two_dimensions",
       [routed](SequenceBalancer& b) {
         const at::Tensor h = routed(b).flatten(1);
         b.attention(h, h, h, [](const at::Tensor& q, auto...) { return q; });
       },
       attention, "ArgumentError", "expected at least 3 dimensions"},
      {"post_first", [routed](SequenceBalancer& b) { b.post_attn(routed(b).view({-1, 2, 2})); }, attention,
       "StateError", "pre_attn: has not been called since plan_routing, expected before post_attn"},
      {"lens_zero", [](SequenceBalancer& b) { b.plan_routing(std::vector<int64_t>{3, 0}, 8); }, plan, "ArgumentError",
       "seq_lens: got 0 for sequence 1"},
      {"lens_negative", [](SequenceBalancer& b) { b.plan_routing(std::vector<int64_t>{-3}, 8); }, plan, "ArgumentError",
       "seq_lens: got -3 for sequence 0"},
      {"width", [](SequenceBalancer& b) { b.plan_routing(std::vector<int64_t>{3}, 9); }, plan, "ArgumentError",
       "d_model: got 9 on rank 1, expected 8, as on rank 0"},
      {"width_zero", [](SequenceBalancer& b) { b.plan_routing(std::vector<int64_t>{3}, 0); }, plan, "ArgumentError",
       "d_model: got 0"},
      {"outside",
       [](SequenceBalancer& b) {
         const StateError error("attention ran out of memory");
         b.report(error);
         throw error;
       },
       route, "StateError", "attention ran out of memory"},
  };
}

class Mistakes : public ::testing::TestWithParam<Mistake> {};

INSTANTIATE_TEST_SUITE_P(All, Mistakes, ::testing::ValuesIn(mistakes()),
                         [](const auto& test) { return test.param.name; });

void plan_and_route(SequenceBalancer& balancer) {
  balancer.plan_routing(std::vector<int64_t>{3, 4}, 8);
  balancer.route(x_of(balancer), {x_of(balancer, at::kLong)}, {});
}

TEST_P(Mistakes, RaisesOnAllRanksWithItsWords) {
  // Once as the first call, once after steps have made it the predicted one.
  for (const int32_t steps : {0, 2}) {
    SCOPED_TRACE(::testing::Message() << "after " << steps << " steps");
    Ranks ranks(2);
    const auto messages = ranks.all_raise([&](int32_t rank) {
      const auto balancer = ranks.balancer(rank, "g2n1");
      for (int32_t i = 0; i < steps; ++i) plan_and_route(*balancer);
      balancer->plan_routing(std::vector<int64_t>{3, 4}, 8);
      (rank == 1 ? GetParam().call : GetParam().rest_call)(*balancer);
      // A call that went through on its own ends in the next one.
      plan_and_route(*balancer);
    });
    for (const std::string& message : messages) {
      EXPECT_TRUE(message.starts_with(GetParam().kind)) << message;
      expect_part(message, GetParam().words);
    }
  }
}

TEST(Errors, StopTheBalancerAndNotTheNext) {
  Ranks ranks(2);
  ranks.world().run_all([&](int32_t rank) {
    {
      const auto balancer = ranks.balancer(rank, "g2n1");
      EXPECT_THROW(balancer->plan_routing(std::vector<int64_t>{rank == 0 ? 0 : 1}, 8), ArgumentError);
      try {
        balancer->plan_routing(std::vector<int64_t>{1}, 8);
        ADD_FAILURE();
      } catch (const StateError& error) {
        expect_part(error.what(), "stopped by an earlier error");
        expect_part(error.what(), "seq_lens: got 0");
      }
    }
    // Nothing was in flight: the groups are as good as new.
    const auto balancer = ranks.balancer(rank, "g2n1");
    plan_and_route(*balancer);
  });
}

TEST(Errors, ReachRanksOfOtherBags) {
  Ranks ranks(4);
  const auto messages = ranks.all_raise([&](int32_t rank) {
    const auto balancer = ranks.balancer(rank, "g2n2");
    plan_and_route(*balancer);
    const at::Tensor heads = at::zeros({balancer->plan().tokens_after()[static_cast<size_t>(rank)], 2, 2});
    balancer->pre_attn(rank == 3 ? heads.narrow(2, 0, 1) : heads, heads, heads);
    // Ranks 0 and 1 get through, and wait here.
    plan_and_route(*balancer);
  });
  for (const std::string& message : messages) expect_part(message, "pre_attn: q: got ");
  expect_part(messages[0], "rank ");
}

TEST(Errors, OfTheBackwardReachAllRanks) {
  Ranks ranks(2);
  const auto messages = ranks.all_raise([&](int32_t rank) {
    const auto balancer = ranks.balancer(rank, "g2n1");
    balancer->plan_routing(std::vector<int64_t>{3, 4}, 8);
    const auto routed = balancer->route(at::zeros({7, 4}).set_requires_grad(true));
    // Rank 1 forgets its backward and goes on.
    if (rank == 0) routed.x.sum().backward();
    plan_and_route(*balancer);
  });
  for (const std::string& message : messages) {
    expect_part(message, "call: got ");
    expect_part(message, "route backward");
  }
}

TEST(Errors, OptionsThatDiffer) {
  struct Case {
    std::string topology;
    double gamma;
    std::string mask;
    std::string solver;
    std::vector<std::string> words;
  };
  // Either rank may be the one that finds the difference.
  const std::vector<Case> odd_ones = {
      {"g1n2", 1, "full", "balanced", {"topology: got ", "g1n2", "g2n1"}},
      {"g2n1", 0.5, "full", "balanced", {"gamma: got ", "0.5"}},
      {"g2n1", 1, "causal", "balanced", {"mask: got ", "causal", "full"}},
      {"g2n1", 1, "full", "greedy", {"solver: got ", "greedy", "balanced"}},
      {"g2n1", 1, "full", "magic", {"solver: got 'magic', expected "}},
      {"g2n", 1, "full", "greedy", {"topology: got "}},
      {"g3n1", 1, "full", "greedy", {"topology: got "}},
      {"g2/1n1", 1, "full", "greedy", {"solver: got 'greedy' for topology g2/1n1, expected flat bags"}},
      {"g2n1", -1, "full", "greedy", {"gamma: got -1"}}};
  for (const Case& odd : odd_ones) {
    const BalancerOptions options{
        .plan = {.workload = {.gamma = odd.gamma}}, .solver = odd.solver, .mask = Mask::parse(odd.mask)};
    const BalancerOptions others{.plan = {.workload = {.gamma = 1}}};
    Ranks ranks(2);
    for (const std::string& message : ranks.all_raise([&](int32_t rank) {
           static_cast<void>(rank == 0 ? ranks.balancer(0, odd.topology, options) : ranks.balancer(1, "g2n1", others));
         })) {
      for (const std::string& words : odd.words) expect_part(message, words);
    }
  }
}

/// Another value of a field, within its bounds.
template <class T>
T another(T value) {
  if constexpr (std::is_same_v<T, bool>) return !value;
  if constexpr (std::is_same_v<T, StepMode>) return StepMode::kLora;
  if constexpr (std::is_arithmetic_v<T>) return static_cast<T>(value + 1);
}

TEST(Errors, OptionsThatDifferInAnyParameterOfTheCost) {
  const auto expect_named = [](const std::string& name, const BalancerOptions& odd) {
    Ranks ranks(2);
    for (const std::string& message : ranks.all_raise([&](int32_t rank) {
           static_cast<void>(rank == 0 ? ranks.balancer(0, "g2n1", odd) : ranks.balancer(1, "g2n1"));
         })) {
      expect_part(message, name + ": got ");
    }
  };
  for_each_field<Cluster>([&](const auto& field) {
    BalancerOptions odd;
    odd.plan.cluster.*field.member = another(odd.plan.cluster.*field.member);
    expect_named(text("cluster.", field.name), odd);
  });
  for_each_field<TrainedModel>([&](const auto& field) {
    BalancerOptions odd;
    if (std::string_view(field.name) == "num_kv_heads") return;  // needs num_heads, which differ then
    odd.plan.model.*field.member = another(odd.plan.model.*field.member);
    expect_named(text("model.", field.name), odd);
  });
  BalancerOptions odd;
  odd.plan.rank_speed = {1, 2};
  expect_named("rank_speed", odd);
  odd = {};
  odd.plan.max_tokens_per_rank = 100;
  expect_named("max_tokens_per_rank", odd);
}

TEST(Errors, BagsWithoutGroups) {
  Ranks ranks(4);
  auto messages = ranks.all_raise([&](int32_t rank) {
    const auto make = [&](const std::vector<int64_t>& of) {
      return rank == 2 ? nullptr : ranks.world().group(of, rank);
    };
    const SequenceBalancer balancer("g2n2", {}, ranks.world().all(rank), make);
  });
  for (const std::string& message : messages)
    expect_part(message, "make_bag_group: got no group for bag 1, expected one of its ranks 2 to 3");
  messages = ranks.all_raise([&](int32_t rank) {
    const std::vector<int64_t> others = {0, 1, 2};
    const auto make = [&](const std::vector<int64_t>& of) {
      return ranks.world().group(rank == 2 ? others : of, rank);
    };
    const SequenceBalancer balancer("g2n2", {}, ranks.world().all(rank), make);
  });
  for (const std::string& message : messages)
    expect_part(message, "make_bag_group: got a group in which this is rank 2 of 3, expected one");
}

TEST(Errors, BeforeThePlan) {
  Ranks ranks(2);
  for (const std::string& message : ranks.all_raise([&](int32_t rank) {
         const auto balancer = ranks.balancer(rank, "g2n1");
         if (rank == 1) balancer->plan_routing(std::vector<int64_t>{1}, 8);
         balancer->route(at::zeros({1, 4}));
       })) {
    expect_part(message, "plan_routing: has made no plan, expected one before anything moves");
  }
}

}  // namespace
}  // namespace knapformer
