#include "knapformer/core/model/load_observer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "knapformer/core/model/cluster.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

/// The unit in which FLOPs are counted, so that no sum of squares loses digits.
constexpr double kFlopsUnit = 1e12;
/// Alternations between the common fit and the ranks' speeds: more change nothing that could be measured.
constexpr int kAlternations = 4;

void LoadObserver::Moments::add(const Moments& other, double speed) {
  const double square = speed * speed;
  count += other.count;
  t += other.t / speed;
  a += other.a / speed;
  tt += other.tt / square;
  ta += other.ta / square;
  aa += other.aa / square;
}

LoadObserver::LoadObserver(double gamma, std::vector<double> rank_speed, int32_t num_ranks)
    : given_gamma_(gamma),
      given_speed_(std::move(rank_speed)),
      ranks_(static_cast<size_t>(num_ranks)),
      gamma_(gamma),
      rank_speed_(given_speed_) {
  if (given_speed_.empty()) given_speed_.assign(ranks_.size(), 1.0);
}

double LoadObserver::rate(const LoadMeasurement& m) const {
  return (m.token_work + given_gamma_ * m.attention_work) / m.seconds / given_speed_[m.rank];
}

std::optional<LoadMeasurement> LoadObserver::add(std::span<const LoadMeasurement> measurements) {
  if (measurements.empty()) return std::nullopt;
  std::optional<LoadMeasurement> left_out;
  const auto is_idle = [](const LoadMeasurement& m) { return m.token_work + m.attention_work <= 0; };
  std::vector<double>& rates_now = recent_rates_.emplace_back();
  for (const LoadMeasurement& m : measurements) {
    if (!is_idle(m)) rates_now.push_back(rate(m));
  }
  if (recent_rates_.size() > kStepsCompared) recent_rates_.pop_front();
  std::vector<double> rates;
  for (const std::vector<double>& of_step : recent_rates_) rates.insert(rates.end(), of_step.begin(), of_step.end());
  std::ranges::sort(rates);
  if (!rates.empty()) {
    const auto median = rates.begin() + std::ssize(rates) / 2;
    // Of two medians the one nearer the last; at first the faster: first steps are slow.
    const double near = recent_rates_.size() < kStepsCompared ? kMaxMagnitude : usual_rate_;
    usual_rate_ = std::clamp(near, *(std::ssize(rates) % 2 == 0 ? median - 1 : median), *median);
  }

  for (Moments& rank : ranks_) {
    for (double* sum : {&rank.count, &rank.t, &rank.a, &rank.tt, &rank.ta, &rank.aa}) *sum *= kFade;
  }
  for (const LoadMeasurement& m : measurements) {
    if (is_idle(m)) continue;  // tells nothing
    if (const double ratio = rate(m) / usual_rate_; !(ratio >= 1 / kPlausible && ratio <= kPlausible)) {
      if (!left_out) left_out = m;
      continue;
    }
    const double t = m.token_work / kFlopsUnit / m.seconds, a = m.attention_work / kFlopsUnit / m.seconds;
    ranks_[m.rank].add({.count = 1, .t = t, .a = a, .tt = t * t, .ta = t * a, .aa = a * a});
    ++num_measurements_;
  }
  if (num_measurements_ >= kMinMeasurements) learn();
  return left_out;
}

LoadObserver::Moments LoadObserver::total(std::span<const double> speed) const {
  Moments sum;
  for (size_t r = 0; r < ranks_.size(); ++r) sum.add(ranks_[r], speed[r]);
  return sum;
}

LoadObserver::Fit LoadObserver::Moments::with_gamma(double gamma) const {
  const double sum = t + gamma * a, sum_of_squares = tt + 2 * gamma * ta + gamma * gamma * aa;
  return {.k = sum_of_squares > 0 ? sum / sum_of_squares : 0, .gamma = gamma};
}

LoadObserver::Fit LoadObserver::fit(const Moments& m) const {
  const double determinant = m.tt * m.aa - m.ta * m.ta;
  if (determinant <= 1e-12 * m.tt * m.aa) return m.with_gamma(given_gamma_);  // the two kinds can not be told apart
  const double k = (m.aa * m.t - m.ta * m.a) / determinant;
  const double k_gamma = (m.tt * m.a - m.ta * m.t) / determinant;
  if (!(k > 0)) return m.with_gamma(given_gamma_);
  const double gamma = std::max(k_gamma / k, 0.0);
  const double free = std::max(m.count - 2, 1.0);
  const double error = error_of(m, {.k = k, .gamma = k_gamma / k});
  const double noise = m.count * error * error / free;
  // The variance of gamma = k_gamma / k, to first order.
  const double variance = noise / determinant * (m.tt + 2 * gamma * m.ta + gamma * gamma * m.aa) / (k * k);
  const double spread = kPriorSpread * given_gamma_;
  const double prior = spread * spread;
  if (prior <= 0) return m.with_gamma(given_gamma_);  // gamma 0: attention was said to cost nothing
  return m.with_gamma((gamma * prior + given_gamma_ * variance) / (prior + variance));
}

double LoadObserver::error_of(const Moments& m, const Fit& f) {
  const double first = f.k * (m.t + f.gamma * m.a);
  const double second = f.k * f.k * (m.tt + 2 * f.gamma * m.ta + f.gamma * f.gamma * m.aa);
  return m.count > 0 ? std::sqrt(std::max(second - 2 * first + m.count, 0.0) / m.count) : 0;
}

void LoadObserver::learn() {
  const Moments as_given = total(given_speed_);
  given_error_ = error_of(as_given, as_given.with_gamma(given_gamma_));

  std::vector<double> speed = given_speed_;
  Fit learned;
  for (int i = 0; i < kAlternations; ++i) {
    learned = fit(total(speed));
    double sum = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const Moments& m = ranks_[r];
      // The mean of (expected seconds at speed 1) / (measured seconds), as measured is expected / speed.
      if (m.count > 0) speed[r] = learned.k * (m.t + learned.gamma * m.a) / m.count;
      sum += speed[r];
    }
    for (double& s : speed) s *= static_cast<double>(speed.size()) / sum;
  }
  learned = fit(total(speed));
  const auto [slowest, fastest] = std::ranges::minmax(speed);
  if (!(learned.gamma <= kMaxMagnitude && fastest <= slowest * kMaxSpeedRatio)) return;  // no plan would take them
  gamma_ = learned.gamma;
  learned_error_ = error_of(total(speed), learned);
  const bool equal = std::all_of(speed.begin(), speed.end(), [](double s) { return std::abs(s - 1) <= kEqualSpeed; });
  rank_speed_ = equal ? std::vector<double>() : std::move(speed);
}

}  // namespace knapformer
