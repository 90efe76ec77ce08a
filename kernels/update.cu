// Steps of the optimizer, over whole slabs.

struct Rule {
    float rate, momentum, clip, average_decay, statistic_share;
    int nesterov;
};

// Clips the gradient `g`, then, in this order, `slot = momentum * slot + g`, `param -= rate * slot` (Nesterov:
// `rate * (g + momentum * slot)`; without slots: `rate * g`), and `average -= (1 - decay) * (average - param)`.
// Slots and averages may be absent (null). What lies behind the first `trained` are statistics.
extern "C" __global__ void update(float *params, const float *grads, float *slots, float *averages, Rule rule, int trained,
                                  int n) {
    EACH(i, n) {
        float g = grads[i], p = params[i];
        if (i >= trained) {
            params[i] = p - rule.statistic_share * g;
            continue;
        }
        // A NaN passes.
        g = g > rule.clip ? rule.clip : g < -rule.clip ? -rule.clip : g;
        if (slots) {
            float v = rule.momentum * slots[i] + g;
            slots[i] = v;
            g = rule.nesterov ? g + rule.momentum * v : v;
        }
        p -= rule.rate * g;
        params[i] = p;
        if (averages) averages[i] -= (1.0f - rule.average_decay) * (averages[i] - p);
    }
}
