/* A known power trace, sensors that look at it the way real ones do, and faults.
 *
 * Everything is a pure function of CLOCK_MONOTONIC and of a control file that the test process maps too: what a library
 * answers now can be changed at run time, in every process that has it loaded. The layout is repeated in control.py.
 */
#ifndef TRACE_MODEL_H
#define TRACE_MODEL_H

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x4e505553545542ULL
#define LAYOUT 2
#define MAX_BOARDS 128
#define MAX_FAULTS 16
#define MAX_SPANS 8
#define MAX_MIG 7
#define TEXT 96

enum { CONSTANT, SQUARE, SINE, TELEGRAPH };
enum {
    FAULT_NONE,
    FAULT_POWER_ERROR,    /* value: status code of power readings */
    FAULT_COUNTER_ERROR,  /* value: status code of the energy counter */
    FAULT_LOST,           /* value: status code of every call about this board */
    FAULT_COUNTER_RESET,  /* at t0 the counter starts again from value joules */
    FAULT_COUNTER_FREEZE, /* between t0 and t1 the counter stays at what it was at t0 */
    FAULT_COUNTER_ADD,    /* between t0 and t1 the counter reads value joules too much */
    FAULT_COUNTER_WRAP,   /* the counter is taken modulo value joules */
    FAULT_POWER_VALUE,    /* power reads value watts */
    FAULT_POWER_FREEZE,   /* power stays at what it was at t0 */
    FAULT_SLOW,           /* every reading of this board takes value seconds longer */
    FAULT_OTHER_ERROR,    /* value: status code of utilization, memory and temperature */
};
enum { CALL_INIT, CALL_SHUTDOWN, CALL_HANDLE, CALL_POWER, CALL_COUNTER, CALL_FIELDS, CALL_OTHER, CALL_KINDS };

typedef struct {
    double period_s, window_s, phase_s; /* time between updates; averaged over window_s before each (0: none) */
    double jitter; /* updates come early or late by up to this share of the period */
    int64_t supported;
} Sensor;

typedef struct {
    int64_t kind;
    double t0, t1, value;
} Fault;

typedef struct {
    double t0, t1, power_w;
} Span;

typedef struct {
    char uuid[TEXT], name[TEXT], pci[TEXT], node[TEXT], slot[TEXT];
    char mig[MAX_MIG][TEXT];
    int64_t n_mig, mig_mode, architecture, target_type, chip_id, load_kind;
    double low_w, high_w, period_s, duty, phase_s;
    uint64_t bits; /* levels of the 64 steps of a telegraph signal */
    Span spans[MAX_SPANS];
    int64_t n_spans;
    Sensor power, instant, average, counter;
    double noise_w, gain, offset_w, counter_gain, epoch_s, counter_start_j, limit_w;
    uint64_t seed;
    Fault faults[MAX_FAULTS];
    int64_t calls[CALL_KINDS];
} Board;

typedef struct {
    uint64_t magic, layout, size;
    int64_t n_boards, init_error;
    double call_s; /* every reading takes this long */
    int64_t calls[CALL_KINDS];
    Board boards[MAX_BOARDS];
} Control;

static Control *control = NULL;
static pthread_mutex_t part_time_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    int64_t tick;
    double sum_j;
} part_time[MAX_BOARDS];

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Look at another control file; NULL: at none, as if there were no driver. Returns whether it could be mapped. */
int stub_attach(const char *path) {
    Control *mapped = NULL;
    if (path && *path) {
        int file = open(path, O_RDWR);
        if (file < 0) return 0;
        mapped = mmap(NULL, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED) return 0;
        if (mapped->magic != MAGIC || mapped->layout != LAYOUT || mapped->size != sizeof(Control)) {
            munmap(mapped, sizeof(Control));
            return 0;
        }
    }
    /* the old mapping stays: another thread may be reading through it */
    control = mapped;
    memset(part_time, 0, sizeof part_time);
    return 1;
}

uint64_t stub_control_size(void) { return sizeof(Control); }

static void attach_from(const char *variable) {
    if (!control && getenv(variable)) stub_attach(getenv(variable));
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static double gaussian(uint64_t seed) {
    double u = ((double)(mix(seed) >> 11) + 0.5) / 9007199254740992.0;
    double v = (double)(mix(seed ^ 0x5555555555555555ULL) >> 11) / 9007199254740992.0;
    return sqrt(-2.0 * log(u)) * cos(2.0 * M_PI * v);
}

/* Energy of the periodic load from phase_s to t, which may lie before it. */
static double periodic_j(const Board *b, double t) {
    double x = t - b->phase_s, swing = b->high_w - b->low_w;
    if (b->load_kind == CONSTANT) return b->high_w * x;
    double n = floor(x / b->period_s), rest = x - n * b->period_s;
    if (b->load_kind == SQUARE) {
        double on = b->duty * b->period_s;
        return b->low_w * x + swing * (n * on + fmin(rest, on));
    }
    if (b->load_kind == SINE) {
        double turns = 2.0 * M_PI / b->period_s;
        return 0.5 * (b->low_w + b->high_w) * x + 0.5 * swing * (1.0 - cos(turns * rest)) / turns;
    }
    double step = b->period_s, block = floor(n / 64.0); /* telegraph: period_s is one step */
    int k = (int)(n - block * 64.0), below = __builtin_popcountll(k ? b->bits & (~0ULL >> (64 - k)) : 0);
    double steps = block * __builtin_popcountll(b->bits) + below + ((b->bits >> k) & 1 ? rest / step : 0.0);
    return b->low_w * x + swing * steps * step;
}

static double periodic_w(const Board *b, double t) {
    double x = t - b->phase_s;
    if (b->load_kind == CONSTANT) return b->high_w;
    double n = floor(x / b->period_s), rest = x - n * b->period_s;
    int high = b->load_kind == SQUARE ? rest < b->duty * b->period_s : (int)((b->bits >> (int)(n - floor(n / 64.0) * 64.0)) & 1);
    if (b->load_kind == SINE) return 0.5 * (b->low_w + b->high_w) + 0.5 * (b->high_w - b->low_w) * sin(2.0 * M_PI * rest / b->period_s);
    return high ? b->high_w : b->low_w;
}

static double energy_between(const Board *b, double t0, double t1) {
    double sum = periodic_j(b, t1) - periodic_j(b, t0);
    for (int i = 0; i < b->n_spans; i++) { /* spans replace the periodic load */
        double from = fmax(t0, b->spans[i].t0), to = fmin(t1, b->spans[i].t1);
        if (to > from) sum += b->spans[i].power_w * (to - from) - (periodic_j(b, to) - periodic_j(b, from));
    }
    return sum;
}

static double power_at(const Board *b, double t) {
    for (int i = 0; i < b->n_spans; i++)
        if (t >= b->spans[i].t0 && t < b->spans[i].t1) return b->spans[i].power_w;
    return periodic_w(b, t);
}

static const Fault *fault(const Board *b, int kind, double t) {
    for (int i = 0; i < MAX_FAULTS; i++)
        if (b->faults[i].kind == kind && t >= b->faults[i].t0 && t < b->faults[i].t1) return &b->faults[i];
    return NULL;
}

static int fault_code(const Board *b, int kind, double t) {
    const Fault *f = fault(b, kind, t);
    return f ? (int)f->value : 0;
}

/* When update k comes. */
static double tick_s(const Sensor *s, int64_t k) {
    double at = s->phase_s + (double)k * s->period_s;
    if (s->jitter <= 0.0) return at;
    uint64_t bits;
    memcpy(&bits, &s->phase_s, sizeof bits);
    double chance = (double)(mix(bits ^ mix((uint64_t)k)) >> 11) / 9007199254740992.0;
    return at + s->jitter * s->period_s * (2.0 * chance - 1.0);
}

/* The newest update at time t: its number and when it came. */
static double tick_of(const Sensor *s, double t, int64_t *number) {
    if (s->period_s <= 0.0) {
        *number = (int64_t)(t * 1e6);
        return t;
    }
    int64_t k = (int64_t)floor((t - s->phase_s) / s->period_s) + 1;
    while (tick_s(s, k) > t) k--;
    *number = k;
    return tick_s(s, k);
}

/* What a power sensor says at time t, in watts. */
static double sensed_w(const Board *b, const Sensor *s, double t) {
    const Fault *f = fault(b, FAULT_POWER_VALUE, t);
    if (f) return f->value;
    f = fault(b, FAULT_POWER_FREEZE, t);
    int64_t number;
    double tick = tick_of(s, f ? f->t0 : t, &number);
    double w = s->window_s > 0.0 ? energy_between(b, tick - s->window_s, tick) / s->window_s : power_at(b, tick);
    if (b->noise_w > 0.0) w += b->noise_w * gaussian(b->seed * 1000003ULL + (uint64_t)number);
    return fmax(0.0, w * b->gain + b->offset_w);
}

/* Energy that the counter has added up from its start to the tick before t, in joules. */
static double counted_j(const Board *b, double t) {
    int64_t last, first;
    double tick = tick_of(&b->counter, t, &last);
    if (b->counter.window_s <= 0.0 || b->counter.period_s <= 0.0) return energy_between(b, b->epoch_s, tick);
    tick_of(&b->counter, b->epoch_s, &first);
    int64_t index = b - control->boards;
    pthread_mutex_lock(&part_time_lock);
    int64_t from = first;
    double sum = 0.0;
    if (part_time[index].tick > first && part_time[index].tick <= last && b->n_spans == 0) {
        from = part_time[index].tick;
        sum = part_time[index].sum_j;
    }
    for (int64_t k = from + 1; k <= last; k++) { /* the power seen in part of each period stands for all of it */
        double at = tick_s(&b->counter, k), seen_j = energy_between(b, at - b->counter.window_s, at);
        sum += seen_j / b->counter.window_s * (at - tick_s(&b->counter, k - 1));
    }
    part_time[index].tick = last;
    part_time[index].sum_j = sum;
    pthread_mutex_unlock(&part_time_lock);
    return sum;
}

/* What the energy counter says at time t, in joules. */
static double counter_j(const Board *b, double t) {
    const Fault *f = fault(b, FAULT_COUNTER_FREEZE, t);
    if (f) t = f->t0;
    double value = b->counter_start_j + b->counter_gain * counted_j(b, t), reset_at = -INFINITY;
    for (int i = 0; i < MAX_FAULTS; i++) {
        const Fault *r = &b->faults[i];
        if (r->kind != FAULT_COUNTER_RESET || t < r->t0 || r->t0 < reset_at) continue;
        reset_at = r->t0;
        value = r->value + b->counter_gain * (counted_j(b, t) - counted_j(b, r->t0));
    }
    if ((f = fault(b, FAULT_COUNTER_ADD, t))) value += f->value;
    if ((f = fault(b, FAULT_COUNTER_WRAP, t))) value = fmod(value, f->value);
    return fmax(0.0, value);
}

static void count(Board *b, int kind) {
    __atomic_fetch_add(&control->calls[kind], 1, __ATOMIC_RELAXED);
    if (b) __atomic_fetch_add(&b->calls[kind], 1, __ATOMIC_RELAXED);
}

/* Take the time that a reading takes; the answer is that of the middle of the call. */
static double reading_time(const Board *b) {
    const Fault *f = fault(b, FAULT_SLOW, now_s());
    double wait = control->call_s + (f ? f->value : 0.0);
    if (wait <= 0.0) return now_s();
    struct timespec half = {(time_t)(wait / 2.0), (long)(fmod(wait / 2.0, 1.0) * 1e9)};
    nanosleep(&half, NULL);
    double t = now_s();
    nanosleep(&half, NULL);
    return t;
}

/* For the test that holds this model and its second writing in Python together. */
double stub_truth_j(int board, double t0, double t1) { return energy_between(&control->boards[board], t0, t1); }
double stub_power_w(int board, double t) { return sensed_w(&control->boards[board], &control->boards[board].power, t); }
double stub_counter_j(int board, double t) { return counter_j(&control->boards[board], t); }

#endif
