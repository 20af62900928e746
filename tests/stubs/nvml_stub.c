/* libnvidia-ml.so.1 as nvidia-ml-py 13 calls it, over the boards of trace_model.h. */
#include "trace_model.h"

#define API __attribute__((visibility("default")))
enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15,
};
typedef struct { int board, mig; } Handle; /* mig: -1 the board itself, else a MIG device of it */
typedef Handle *Device;
static Handle handles[MAX_BOARDS][MAX_MIG + 1];
static int users = 0;

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    attach_from("LIGHTNING_NPU_STUB_NVML");
    if (!control) return DRIVER_NOT_LOADED;
    count(NULL, CALL_INIT);
    if (control->init_error) return (int)control->init_error;
    for (int i = 0; i < MAX_BOARDS; i++)
        for (int m = 0; m <= MAX_MIG; m++) handles[i][m] = (Handle){i, m - 1};
    users++;
    return OK;
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }
API int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    if (control) count(NULL, CALL_SHUTDOWN);
    users--;
    return OK;
}
void stub_forget_users(void) { users = 0; }

API const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case 16: return "GPU requires restart";
    case 18: return "Driver/library version mismatch";
    case 28: return "No GPUs Found";
    default: return "Unknown Error";
    }
}

static int text(char *to, unsigned room, const char *from) {
    if (strlen(from) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

API int nvmlSystemGetDriverVersion(char *to, unsigned room) { return users ? text(to, room, "580.00.stub") : UNINITIALIZED; }
API int nvmlSystemGetNVMLVersion(char *to, unsigned room) { return users ? text(to, room, "13.580.00.stub") : UNINITIALIZED; }
API int nvmlSystemGetCudaDriverVersion(int *v) { *v = 13000; return users ? OK : UNINITIALIZED; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { return nvmlSystemGetCudaDriverVersion(v); }

API int nvmlDeviceGetCount_v2(unsigned *n) {
    if (!users || !control) return UNINITIALIZED;
    *n = (unsigned)control->n_boards;
    return OK;
}
API int nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }

static int give(int board, int mig, Device *d) {
    int lost = fault_code(&control->boards[board], FAULT_LOST, now_s());
    if (lost) return lost;
    *d = &handles[board][mig + 1];
    return OK;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *d) {
    if (!users || !control) return UNINITIALIZED;
    count(NULL, CALL_HANDLE);
    return index < control->n_boards ? give((int)index, -1, d) : INVALID_ARGUMENT;
}
API int nvmlDeviceGetHandleByIndex(unsigned index, Device *d) { return nvmlDeviceGetHandleByIndex_v2(index, d); }

API int nvmlDeviceGetHandleByUUID(const char *uuid, Device *d) {
    if (!users || !control) return UNINITIALIZED;
    count(NULL, CALL_HANDLE);
    for (int i = 0; i < control->n_boards; i++) {
        if (!strcmp(control->boards[i].uuid, uuid)) return give(i, -1, d);
        for (int m = 0; m < control->boards[i].n_mig; m++)
            if (!strcmp(control->boards[i].mig[m], uuid)) return give(i, m, d);
    }
    return NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Device *d) {
    if (!users || !control) return UNINITIALIZED;
    count(NULL, CALL_HANDLE);
    for (int i = 0; i < control->n_boards; i++) { /* the domain may have four digits or eight, or be left out */
        const char *own = control->boards[i].pci;
        if (!strcasecmp(own, pci) || !strcasecmp(own + 4, pci) || !strcasecmp(own + 9, pci)) return give(i, -1, d);
    }
    return NOT_FOUND;
}

/* What every call about a board begins with. */
#define BOARD_OR_RETURN(d, kind) \
    if (!users || !control) return UNINITIALIZED; \
    if (!(d) || (d)->board >= control->n_boards) return INVALID_ARGUMENT; \
    Board *b = &control->boards[(d)->board]; \
    count(b, kind); \
    double t = (kind) == CALL_HANDLE ? now_s() : reading_time(b); \
    int lost = fault_code(b, FAULT_LOST, t); \
    if (lost) return lost;

#define OTHER_OR_RETURN(d) \
    BOARD_OR_RETURN(d, CALL_OTHER) \
    int failing = fault_code(b, FAULT_OTHER_ERROR, t); \
    if (failing) return failing;

API int nvmlDeviceGetIndex(Device d, unsigned *index) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    *index = (unsigned)d->board;
    return OK;
}
API int nvmlDeviceGetName(Device d, char *to, unsigned room) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    return text(to, room, b->name);
}
API int nvmlDeviceGetUUID(Device d, char *to, unsigned room) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    return text(to, room, d->mig < 0 ? b->uuid : b->mig[d->mig]);
}
API int nvmlDeviceGetSerial(Device d, char *to, unsigned room) {
    (void)to, (void)room;
    BOARD_OR_RETURN(d, CALL_HANDLE)
    return NOT_SUPPORTED;
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
API int nvmlDeviceGetPciInfo_v3(Device d, Pci *info) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    memset(info, 0, sizeof *info);
    if (sscanf(b->pci, "%x:%x:%x", &info->domain, &info->bus, &info->device) != 3) return NOT_SUPPORTED;
    snprintf(info->bus_id, sizeof info->bus_id, "%.31s", b->pci);
    snprintf(info->legacy, sizeof info->legacy, "%.15s", b->pci + 4);
    info->id = 0x20b010de;
    return OK;
}

API int nvmlDeviceGetMigMode(Device d, unsigned *current, unsigned *pending) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    if (b->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)b->mig_mode;
    return OK;
}
API int nvmlDeviceGetMaxMigDeviceCount(Device d, unsigned *n) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    *n = b->mig_mode < 0 ? 0 : MAX_MIG;
    return OK;
}
API int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned index, Device *mig) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    if (index >= b->n_mig) return index < MAX_MIG ? NOT_FOUND : INVALID_ARGUMENT;
    return give(d->board, (int)index, mig);
}
API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device d, Device *parent) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    if (d->mig < 0) return INVALID_ARGUMENT;
    return give(d->board, -1, parent);
}
API int nvmlDeviceIsMigDeviceHandle(Device d, unsigned *is) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    *is = d->mig >= 0;
    return OK;
}

static int power_mw(const Board *b, const Sensor *s, Device d, double t, unsigned *mw) {
    if (d->mig >= 0 || !s->supported) return NOT_SUPPORTED;
    int code = fault_code(b, FAULT_POWER_ERROR, t);
    if (!code) *mw = (unsigned)(sensed_w(b, s, t) * 1000.0 + 0.5);
    return code;
}

API int nvmlDeviceGetPowerUsage(Device d, unsigned *mw) {
    BOARD_OR_RETURN(d, CALL_POWER)
    return power_mw(b, &b->power, d, t, mw);
}

API int nvmlDeviceGetTotalEnergyConsumption(Device d, unsigned long long *mj) {
    BOARD_OR_RETURN(d, CALL_COUNTER)
    if (d->mig >= 0 || !b->counter.supported) return NOT_SUPPORTED;
    int code = fault_code(b, FAULT_COUNTER_ERROR, t);
    if (!code) *mj = (unsigned long long)(counter_j(b, t) * 1000.0);
    return code;
}

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    int type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
} Field;

API int nvmlDeviceGetFieldValues(Device d, int n, Field *fields) {
    BOARD_OR_RETURN(d, CALL_FIELDS)
    for (int i = 0; i < n; i++) {
        Field *f = &fields[i];
        f->timestamp = (int64_t)(t * 1e6);
        f->latency_us = 0;
        f->type = 1; /* unsigned int */
        f->value.ull = 0;
        f->code = NOT_SUPPORTED;
        if (f->scope != 0) continue; /* memory and module have no sensor of their own */
        if (f->field == 185) f->code = power_mw(b, &b->average, d, t, &f->value.u);
        if (f->field == 186) f->code = power_mw(b, &b->instant, d, t, &f->value.u);
        if (f->field == 83) { /* total energy, mJ */
            f->type = 3;
            f->code = b->counter.supported && d->mig < 0 ? fault_code(b, FAULT_COUNTER_ERROR, t) : NOT_SUPPORTED;
            if (f->code == OK) f->value.ull = (unsigned long long)(counter_j(b, t) * 1000.0);
        }
        if ((f->field >= 187 && f->field <= 190) || f->field == 192) {
            f->code = OK;
            f->value.u = (unsigned)((f->field == 187 ? 100.0 : b->limit_w) * 1000.0);
        }
    }
    return OK;
}

static int limit(Device d, unsigned *mw) {
    OTHER_OR_RETURN(d)
    if (b->limit_w <= 0.0) return NOT_SUPPORTED;
    *mw = (unsigned)(b->limit_w * 1000.0);
    return OK;
}
API int nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *mw) { return limit(d, mw); }
API int nvmlDeviceGetPowerManagementLimit(Device d, unsigned *mw) { return limit(d, mw); }
API int nvmlDeviceGetPowerManagementDefaultLimit(Device d, unsigned *mw) { return limit(d, mw); }
API int nvmlDeviceGetPowerManagementLimitConstraints(Device d, unsigned *low, unsigned *high) {
    *low = 100000;
    return limit(d, high);
}

API int nvmlDeviceGetArchitecture(Device d, unsigned *a) {
    BOARD_OR_RETURN(d, CALL_HANDLE)
    *a = (unsigned)b->architecture;
    return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
API int nvmlDeviceGetUtilizationRates(Device d, Utilization *u) {
    OTHER_OR_RETURN(d)
    if (b->mig_mode > 0) return NOT_SUPPORTED;
    *u = (Utilization){50, 20};
    return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
API int nvmlDeviceGetMemoryInfo(Device d, Memory *m) {
    OTHER_OR_RETURN(d)
    *m = (Memory){40ULL << 30, 30ULL << 30, 10ULL << 30};
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(Device d, MemoryV2 *m) {
    OTHER_OR_RETURN(d)
    *m = (MemoryV2){m->version, 40ULL << 30, 0, 30ULL << 30, 10ULL << 30};
    return OK;
}

typedef struct { unsigned version; int sensor; int celsius; } Temperature;
API int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *celsius) {
    (void)sensor;
    OTHER_OR_RETURN(d)
    *celsius = 45;
    return OK;
}
API int nvmlDeviceGetTemperatureV(Device d, Temperature *v) {
    OTHER_OR_RETURN(d)
    v->celsius = 45;
    return OK;
}

static int no_processes(Device d, unsigned *n) {
    OTHER_OR_RETURN(d)
    *n = 0;
    return OK;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *n, void *p) { (void)p; return no_processes(d, n); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *n, void *p) { (void)p; return no_processes(d, n); }
API int nvmlDeviceGetComputeMode(Device d, int *mode) {
    OTHER_OR_RETURN(d)
    *mode = 0;
    return OK;
}
API int nvmlDeviceGetPersistenceMode(Device d, int *mode) {
    OTHER_OR_RETURN(d)
    *mode = 1;
    return OK;
}
API int nvmlDeviceGetC2cModeInfoV(Device d, void *info) {
    (void)info;
    BOARD_OR_RETURN(d, CALL_HANDLE)
    return NOT_SUPPORTED;
}
