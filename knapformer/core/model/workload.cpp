#include "knapformer/core/model/workload.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Root of the mean squared relative residual of t = a x + b y.
double relative_rms(std::span<const double> x, std::span<const double> y, std::span<const double> t, double a,
                    double b) {
  double sum = 0;
  for (size_t i = 0; i < t.size(); ++i) {
    const double r = (a * x[i] + b * y[i] - t[i]) / t[i];
    sum += r * r;
  }
  return std::sqrt(sum / static_cast<double>(t.size()));
}

}  // namespace

void WorkloadModel::validate() const { check_range("gamma", gamma, 0); }

WorkloadFit fit_workload(std::span<const int64_t> seq_lens, std::span<const double> latencies_s, int64_t d_model,
                         const Mask& mask) {
  if (d_model < 1) throw_argument("d_model", d_model, "at least 1");
  if (seq_lens.size() != latencies_s.size()) {
    throw_argument("latencies_s", text(latencies_s.size(), " latencies"),
                   text("one for each of the ", seq_lens.size(), " lengths"));
  }
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    if (seq_lens[i] < 1) throw_argument("seq_lens", text(seq_lens[i], " at index ", i), "at least 1 token");
    if (!std::isfinite(latencies_s[i]) || latencies_s[i] <= 0) {
      throw_argument("latencies_s", text(latencies_s[i], " at index ", i), "a positive finite number of seconds");
    }
  }
  if (std::ranges::adjacent_find(seq_lens, std::not_equal_to()) == seq_lens.end())
    throw_argument("seq_lens", text(seq_lens.size(), " lengths, all equal"), "at least two distinct lengths");

  // t = a x + b y with x = 24 l d^2, y = 4 l^2 d; then k = a and gamma = b / a. The fit minimises the relative errors,
  // which are also what is reported: so 1 = a x/t + b y/t. The two unknowns follow from the normal equations. Both
  // columns are scaled to length 1, so that the conditioning depends only on the angle between them.
  const WorkloadModel model{.gamma = 1};
  std::vector<double> x(seq_lens.size()), y(seq_lens.size());
  double xx = 0, yy = 0;
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    x[i] = model.token_work(seq_lens[i], d_model);
    y[i] = model.attention_work_of_pairs(static_cast<double>(mask.pairs(seq_lens[i])), d_model);
    xx += x[i] * x[i] / (latencies_s[i] * latencies_s[i]);
    yy += y[i] * y[i] / (latencies_s[i] * latencies_s[i]);
  }
  const double x_norm = std::sqrt(xx), y_norm = std::sqrt(yy);
  double c = 0, xt = 0, yt = 0, wt = 0, ww = 0;
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    const double t = latencies_s[i], u = x[i] / t / x_norm, v = y[i] / t / y_norm, w = (x[i] + y[i]) / t;
    c += u * v;
    xt += u;
    yt += v;
    wt += w;
    ww += w * w;
  }
  const double det = 1 - c * c;
  const double a = (xt - c * yt) / det / x_norm;
  const double b = (yt - c * xt) / det / y_norm;
  if (!(a > 0)) {
    throw StateError(text("fit_workload: the best k is ", a,
                          " s per FLOP, expected a positive one: the latencies do not grow with "
                          "the lengths as the workload model says; measure more lengths, or with less noise"));
  }
  const double k_alone = wt / ww;
  return {.seconds_per_flop = a,
          .gamma = b / a,
          .relative_rms_error = relative_rms(x, y, latencies_s, a, b),
          .relative_rms_error_without_gamma = relative_rms(x, y, latencies_s, k_alone, k_alone)};
}

}  // namespace knapformer
