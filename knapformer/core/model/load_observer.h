// Learning from measured step times: gamma, and how fast each rank is.
//
// A rank that held T FLOPs of per-token work and A FLOPs of attention (at gamma = 1) is expected to be busy for
//
//   seconds = k / speed * (T + gamma A)
//
// with one k and gamma for all ranks and a speed for each, 1 on average. Every measurement is one equation. k and
// gamma minimise the squared relative errors; older measurements fade. Balanced plans give every rank a similar mix of
// the two kinds of work, so the measurements may say little about gamma. The less they say, the closer gamma stays to
// the given one (a normal prior, and the variance of the least-squares estimate).
//
// A measurement far off those of the other ranks and of the last steps, in another unit than seconds say, is left out.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace knapformer {

/// What one rank measured of one step.
struct LoadMeasurement {
  int32_t rank = 0;
  double token_work = 0;      // FLOPs, as in workload.h
  double attention_work = 0;  // FLOPs at gamma = 1
  double seconds = 0;         // > 0
};

/// Deterministic: the same measurements in the same order give the same figures on every rank and machine.
class LoadObserver {
 public:
  /// rank_speed: the relative speeds that the planner was given; empty: all 1.
  LoadObserver(double gamma, std::vector<double> rank_speed, int32_t num_ranks);

  /// Adds the measurements of one step, from some ranks or all. Returns the first that was left out: its work a second
  /// is more than kPlausible times above or below the median of the last kStepsCompared steps.
  std::optional<LoadMeasurement> add(std::span<const LoadMeasurement> measurements);

  /// The given gamma, until there are kMinMeasurements measurements; the same holds for rank_speed.
  double gamma() const { return gamma_; }
  /// Per rank, 1 on average; empty where no rank is off by more than kEqualSpeed.
  const std::vector<double>& rank_speed() const { return rank_speed_; }
  /// Root mean square of the relative errors with the best k: for the given gamma and speeds, and for the learned ones.
  /// 0 until there are kMinMeasurements measurements.
  double given_error() const { return given_error_; }
  double learned_error() const { return learned_error_; }
  /// Whether the given gamma and speeds miss the measured seconds by more than kDriftError.
  bool drifted() const { return given_error_ > kDriftError; }

  static constexpr int64_t kMinMeasurements = 16;
  static constexpr double kPlausible = 100;
  static constexpr size_t kStepsCompared = 8;
  static constexpr double kFade = 0.98;        // a step
  static constexpr double kPriorSpread = 0.5;  // of gamma, relative: one standard deviation
  static constexpr double kEqualSpeed = 0.03;
  static constexpr double kDriftError = 0.1;

 private:
  struct Fit {
    double k = 0, gamma = 0;
  };
  /// Sums of T/s, A/s and their products over the measurements of one rank.
  struct Moments {
    double count = 0, t = 0, a = 0, tt = 0, ta = 0, aa = 0;
    /// Adds the moments of a rank that is `speed` times as fast as the reference, converted to the reference speed.
    void add(const Moments& other, double speed = 1);
    /// The fit of this gamma and the k that minimises the sum of (k (T + gamma A)/s - 1)^2.
    Fit with_gamma(double gamma) const;
  };

  /// Work a second, at the given gamma and speeds.
  double rate(const LoadMeasurement& measured) const;
  Moments total(std::span<const double> speed) const;
  Fit fit(const Moments& moments) const;
  static double error_of(const Moments& moments, const Fit& fit);
  void learn();

  double given_gamma_ = 1;
  std::vector<double> given_speed_;
  std::vector<Moments> ranks_;
  std::deque<std::vector<double>> recent_rates_;  // by step, those that were left out too
  double usual_rate_ = 0;                         // their median
  int64_t num_measurements_ = 0;
  double gamma_ = 1;
  std::vector<double> rank_speed_;
  double given_error_ = 0, learned_error_ = 0;
};

}  // namespace knapformer
