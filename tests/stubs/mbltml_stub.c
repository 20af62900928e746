/* libmbltml.so over the boards of trace_model.h, in the two forms that vendors ship under one name:
 * MBLTML_FORM 0: the distribution mbltml 0.0.0, fn(dev_no); 1: mobilint-ml 1.5.0, fn(target_device_type, dev_no).
 */
#include "trace_model.h"

#define API __attribute__((visibility("default")))
enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 3, NOT_SUPPORTED = 4, INSUFFICIENT_LENGTH = 5, DEVICE_NOT_FOUND = 6 };
static int users = 0;
static int64_t rail[MAX_BOARDS];

#if MBLTML_FORM == 0
#define WHICH int dev_no
#define FIND find(-1, dev_no)
#else
#define WHICH unsigned type, int dev_no
#define FIND find((int64_t)type, dev_no)
#endif

API unsigned mbltmlInit(void) {
    attach_from("LIGHTNING_NPU_STUB_MBLTML");
    if (!control) {
        fprintf(stderr, "Failed to initialize - No driver installed\n");
        return UNINITIALIZED;
    }
    count(NULL, CALL_INIT);
    if (control->init_error) {
        fprintf(stderr, "Failed to initialize - No driver installed\n");
        return (unsigned)control->init_error;
    }
    users++;
    return OK;
}
API unsigned mbltmlShutdown(void) {
    if (control) count(NULL, CALL_SHUTDOWN);
    users = 0;
    return OK;
}
void stub_forget_users(void) { users = 0; }

API unsigned mbltmlGetDeviceCount(unsigned *n) {
    if (!users || !control) return UNINITIALIZED;
    *n = (unsigned)control->n_boards;
    return OK;
}

/* The board's index, or minus a status code. */
static int find(int64_t type, int dev_no) {
    if (!users || !control) return -UNINITIALIZED;
    int seen = 0, any = 0;
    for (int i = 0; i < control->n_boards; i++) {
        if (type >= 0 && control->boards[i].target_type != type) continue;
        any = 1;
        if (seen++ == dev_no) return i;
    }
    return type >= 0 && !any ? -DEVICE_NOT_FOUND : -INVALID_ARGUMENT;
}

#define BOARD_OR_RETURN(kind) \
    int index = FIND; \
    if (index < 0) return (unsigned)-index; \
    Board *b = &control->boards[index]; \
    count(b, kind); \
    double t = (kind) == CALL_HANDLE ? now_s() : reading_time(b); \
    int lost = fault_code(b, FAULT_LOST, t); \
    if (lost) return (unsigned)lost;

#define OTHER_OR_RETURN \
    BOARD_OR_RETURN(CALL_OTHER) \
    int failing = fault_code(b, FAULT_OTHER_ERROR, t); \
    if (failing) return (unsigned)failing;

static unsigned text(char *to, unsigned room, const char *from) {
    if (strlen(from) + 1 > room) return INSUFFICIENT_LENGTH;
    strcpy(to, from);
    return OK;
}

API unsigned mbltmlGetDriverVersion(unsigned type, char *to, int room) { (void)type; return text(to, (unsigned)room, "1.14.stub"); }
API unsigned mbltmlGetDriverRevision(unsigned type, unsigned *v) { (void)type; *v = 14; return OK; }
API unsigned mbltmlGetNodeName(WHICH, char *to, int room) {
    BOARD_OR_RETURN(CALL_HANDLE)
    return text(to, (unsigned)room, b->node);
}
API unsigned mbltmlGetFirmwareVersion(WHICH, char *to, unsigned room) {
    BOARD_OR_RETURN(CALL_HANDLE)
    return text(to, room, "1.2.5.stub");
}

#if MBLTML_FORM == 0
API unsigned mbltmlInitDevices(unsigned types) { (void)types; return mbltmlInit(); }
API unsigned mbltmlGetDeviceType(WHICH, unsigned *v) {
    BOARD_OR_RETURN(CALL_HANDLE)
    *v = b->target_type == 1 || b->target_type == 3 ? 1 : b->target_type >= 5 ? 4 : 2;
    return OK;
}
API unsigned mbltmlGetHardwareVersion(WHICH, unsigned *v) {
    BOARD_OR_RETURN(CALL_HANDLE)
    *v = (unsigned)b->target_type;
    return OK;
}
#else
API unsigned mbltmlGetTargetDeviceCount(unsigned type, unsigned *n) {
    if (!users || !control) return UNINITIALIZED;
    *n = 0;
    for (int i = 0; i < control->n_boards; i++) *n += control->boards[i].target_type == (int64_t)type;
    return OK;
}
API unsigned mbltmlGetDriverType(WHICH, unsigned *v) {
    BOARD_OR_RETURN(CALL_HANDLE)
    *v = b->target_type == 1 || b->target_type == 3 ? 1 : b->target_type >= 5 ? 4 : 2;
    return OK;
}
API unsigned mbltmlGetOnDeviceDriverVersion(WHICH, char *to, unsigned room) {
    BOARD_OR_RETURN(CALL_HANDLE)
    return text(to, room, "1.14.stub");
}
API unsigned mbltmlGetChipId(WHICH, int *v) {
    BOARD_OR_RETURN(CALL_HANDLE)
    *v = (int)b->chip_id;
    return OK;
}
API unsigned mbltmlGetPcieSlot(WHICH, char *to, unsigned room) {
    BOARD_OR_RETURN(CALL_HANDLE)
    return b->slot[0] ? text(to, room, b->slot) : NOT_SUPPORTED;
}
#endif

API unsigned mbltmlGetTotalPower(WHICH, double *w) {
    BOARD_OR_RETURN(CALL_POWER)
    if (!b->power.supported) return NOT_SUPPORTED;
    int code = fault_code(b, FAULT_POWER_ERROR, t);
    if (!code) *w = sensed_w(b, &b->power, t);
    return (unsigned)code;
}
API unsigned mbltmlGetTotalCurrent(WHICH, double *a) {
    OTHER_OR_RETURN
    *a = sensed_w(b, &b->power, t) / 12.0;
    return OK;
}

/* Values that nothing here depends on: real enough for tools that read all they can. */
#define FIXED(name, type, constant) \
    API unsigned name(WHICH, type *v) { \
        OTHER_OR_RETURN \
        *v = constant; \
        return OK; \
    }
FIXED(mbltmlGetTotalVoltage, double, 12.0)
FIXED(mbltmlGetTotalUtilization, double, 0.5)
FIXED(mbltmlGetMemoryUsage, int64_t, 1LL << 30)
FIXED(mbltmlGetMemoryTotal, int64_t, 16LL << 30)
FIXED(mbltmlGetTemperature, int, 50)
FIXED(mbltmlGetSignalType, unsigned, 0)
FIXED(mbltmlGetNPUClock, unsigned, 1000)
FIXED(mbltmlGetBusClock, unsigned, 500)
FIXED(mbltmlGetFanDuty, int, 30)
FIXED(mbltmlGetVendorId, unsigned, 0x209f)
FIXED(mbltmlGetDeviceId, unsigned, 0)
FIXED(mbltmlGetSubVendorId, unsigned, 0x209f)
FIXED(mbltmlGetSubDeviceId, unsigned, 0)
FIXED(mbltmlGetPcieGen, unsigned, 4)
FIXED(mbltmlGetPcieLanes, unsigned, 8)
FIXED(mbltmlGetPcieRev, unsigned, 1)
FIXED(mbltmlGetPcieClassCode, unsigned, 0x120000)
FIXED(mbltmlGetFirmwareRevision, unsigned, 5)
FIXED(mbltmlGetFirmwareCRC, unsigned, 0)
FIXED(mbltmlGetOnDeviceDriverRevision, unsigned, 14)
FIXED(mbltmlGetPcieSwitchTemperature, int, 40)

/* One rail at a time, chosen for the whole device: half of the board's power is the chip's. */
API unsigned mbltmlSetExtraPmicID(WHICH, unsigned id) {
    OTHER_OR_RETURN
    if (id > 3) return INVALID_ARGUMENT;
    rail[index] = id;
    return OK;
}
API unsigned mbltmlGetExtraPmicId(WHICH, unsigned *id) {
    OTHER_OR_RETURN
    *id = (unsigned)rail[index];
    return OK;
}
API unsigned mbltmlGetExtraPmicPower(WHICH, double *w) {
    OTHER_OR_RETURN
    *w = sensed_w(b, &b->power, t) * (rail[index] == 0 ? 0.5 : 0.1);
    return OK;
}
API unsigned mbltmlGetExtraPmicCurrent(WHICH, double *a) {
    OTHER_OR_RETURN
    *a = 1.0;
    return OK;
}
FIXED(mbltmlGetExtraPmicVoltage, double, 1.0)

typedef struct { int pid, counts; int64_t memory, interval_us, npu_time_us; } Process;
API unsigned mbltmlGetProcessInfos(WHICH, Process *p, unsigned *n) {
    (void)p;
    OTHER_OR_RETURN
    *n = 0;
    return OK;
}
API unsigned mbltmlGetCoreInfos(WHICH, void *p, unsigned *n) {
    (void)p;
    OTHER_OR_RETURN
    *n = 0;
    return OK;
}
