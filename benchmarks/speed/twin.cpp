// The push pass of src/roost/simulator/kernels/push.py in C++, to see what the compiled Python leaves on the table.
// Same arrays, same arithmetic, same order of operations; written as one would write it in C++.
#include <cstdint>
#include <cstring>
#include <vector>

struct Layout {
    int64_t num_ops, num_devices, num_buses;
    const double *time;
    const int64_t *output, *workspace;
    const uint32_t *next_start, *next, *bus;
    const double *latency, *seconds_per_byte, *bus_gap, *device_gap;
};

template <bool MEMORY>
static double push(const Layout &g, const int32_t *device, const int64_t *base, double *ready, int64_t *dying,
                   double *free_at, double *bus_free, int64_t *held, int64_t *peak, int64_t *transfers) {
    const size_t D = g.num_devices;
    double arrives[64];
    uint32_t last[64];
    double step_time = 0;
    int64_t count = 0;
    for (size_t d = 0; d < D; d++) {
        free_at[d] = 0;
        if (MEMORY) held[d] = peak[d] = base[d];
    }
    for (int64_t b = 0; b < g.num_buses; b++) bus_free[b] = 0;
    for (size_t op = 0; op < (size_t)g.num_ops; op++) {
        const size_t here = device[op];
        const uint32_t first = g.next_start[op], beyond = g.next_start[op + 1];
        const double begin = ready[op] > free_at[here] ? ready[op] : free_at[here];
        ready[op] = 0;
        const double takes = g.time[op * D + here], end = begin + takes;
        free_at[here] = takes > 0 ? end + g.device_gap[here] : end;
        if (end > step_time) step_time = end;
        uint64_t targets = 0;
        for (uint32_t e = first; e < beyond; e++) {
            const size_t there = device[g.next[e]];
            targets |= 1ull << there;
            if (MEMORY) last[there] = g.next[e];
        }
        const int64_t size = g.output[op];
        if (MEMORY) {
            held[here] += size;
            const int64_t most = held[here] + g.workspace[op];
            if (most > peak[here]) peak[here] = most;
            int64_t gone = dying[op];
            dying[op] = 0;
            if (targets >> here & 1) dying[last[here]] += size; else gone += size;
            held[here] -= gone;
        }
        uint64_t remote = targets & ~(1ull << here);
        if (!remote) {
            for (uint32_t e = first; e < beyond; e++)
                if (end > ready[g.next[e]]) ready[g.next[e]] = end;
            continue;
        }
        arrives[here] = end;
        for (uint64_t left = remote; left; left &= left - 1) {
            const size_t there = __builtin_ctzll(left), pair = here * D + there;
            const uint32_t line = g.bus[pair];
            const double idle = bus_free[line];
            const double arrival = (end > idle ? end : idle) + (g.latency[pair] + (double)size * g.seconds_per_byte[pair]);
            bus_free[line] = arrival + g.bus_gap[line];
            arrives[there] = arrival;
            count++;
            if (MEMORY) {
                held[there] += size;
                if (held[there] > peak[there]) peak[there] = held[there];
                dying[last[there]] += size;
            }
        }
        for (uint32_t e = first; e < beyond; e++) {
            const uint32_t consumer = g.next[e];
            const double arrival = arrives[device[consumer]];
            if (arrival > ready[consumer]) ready[consumer] = arrival;
        }
    }
    *transfers = count;
    return step_time;
}

extern "C" void push_batch(const Layout *g, const int32_t *devices, int64_t batch, const int64_t *base, int memory,
                           double *step_time, int64_t *peak, int64_t *transfers) {
    std::vector<double> ready(g->num_ops, 0.0), free_at(g->num_devices), bus_free(g->num_buses);
    std::vector<int64_t> dying(g->num_ops, 0), held(g->num_devices);
    for (int64_t b = 0; b < batch; b++) {
        const int32_t *device = devices + b * g->num_ops;
        auto run = memory ? push<true> : push<false>;
        step_time[b] = run(*g, device, base + b * g->num_devices, ready.data(), dying.data(), free_at.data(),
                           bus_free.data(), held.data(), peak + b * g->num_devices, transfers + b);
    }
}
