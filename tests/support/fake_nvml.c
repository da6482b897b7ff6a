/*
 * A TEST DOUBLE of NVIDIA's management library: these GPUs do not exist.
 *
 * Built as libnvidia-ml.so.1, it is loaded by the real pynvml, so that what is tested is the product's own NVML code.
 * Its GPUs are described by the INI file that $FAKE_NVML_CONF names, read again whenever that changes: a test
 * edits the file (by rename, never in place) while the program under test runs. Without the variable there is no
 * driver. tests/support/nvml.py builds this file and writes the INI.
 *
 *   [system]
 *   driver=550.90.07      driver version
 *   cuda=12040            CUDA version, as NVML counts
 *   init_error=0          nvmlReturn_t of nvmlInit and of everything before a device
 *   old=0                 1: a driver without the _v2 memory call
 *   [gpu0]                keys: see `set_device`
 *   name=NVIDIA A100-SXM4-80GB
 *
 * Structures and return codes are those of nvml.h (NVIDIA Management Library API reference).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default"))) int
#define DEVICES_MAX 16
#define PROCESSES_MAX 32
#define LINE_MAX_BYTES 4096
#define TEXT_SIZE 96
#define MIB (1ULL << 20)

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    LIBRARY_NOT_FOUND = 12,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
    VERSION_MISMATCH = 18,
    UNKNOWN = 999,
};

typedef unsigned long long u64;

struct process_list {
    unsigned count;
    unsigned pids[PROCESSES_MAX];
};

struct device {
    unsigned index;
    char name[TEXT_SIZE], uuid[TEXT_SIZE], bus[32];
    char unsupported[256]; /* comma-separated keys whose calls answer NOT_SUPPORTED */
    u64 memory_mib, used_mib, reserved_mib, ecc_errors;
    unsigned utilisation, temperature, power_mw, power_limit_mw, minor, mig, compute_mode;
    unsigned rows_pending, rows_failed;
    int cc_major, cc_minor;
    int error;        /* nvmlReturn_t of every call with this device's handle */
    int handle_error; /* nvmlReturn_t of the call that makes the handle */
    int hang;         /* 1: the memory call does not return until this is 0 again */
    struct process_list compute, graphics, mps;
};

static struct {
    char driver[80];
    int cuda, init_error, old;
    unsigned count;
    struct device devices[DEVICES_MAX];
} machine;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;
static char read_path[LINE_MAX_BYTES];
static struct stat read_status;

/* ---- reading the INI --------------------------------------------------------------------------------------- */

static void set_text(char *field, size_t size, const char *value) { snprintf(field, size, "%s", value); }

static void set_processes(struct process_list *list, char *value)
{
    char *rest = NULL;
    list->count = 0;
    for (char *word = strtok_r(value, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest))
        if (list->count < PROCESSES_MAX)
            list->pids[list->count++] = (unsigned)strtoul(word, NULL, 10);
}

static void set_device(struct device *device, const char *key, char *value)
{
    unsigned number = (unsigned)strtoul(value, NULL, 10);
#define TEXT(name) if (!strcmp(key, #name)) set_text(device->name, sizeof device->name, value)
#define NUMBER(name) if (!strcmp(key, #name)) device->name = number
#define PROCESSES(name) if (!strcmp(key, #name)) set_processes(&device->name, value)
    TEXT(name);
    TEXT(uuid);
    TEXT(bus);
    TEXT(unsupported);
    NUMBER(memory_mib);
    NUMBER(used_mib);
    NUMBER(reserved_mib);
    NUMBER(ecc_errors);
    NUMBER(utilisation);
    NUMBER(temperature);
    NUMBER(power_mw);
    NUMBER(power_limit_mw);
    NUMBER(minor);
    NUMBER(mig);
    NUMBER(compute_mode);
    NUMBER(rows_pending);
    NUMBER(rows_failed);
    NUMBER(error);
    NUMBER(handle_error);
    NUMBER(hang);
    PROCESSES(compute);
    PROCESSES(graphics);
    PROCESSES(mps);
    if (!strcmp(key, "cc"))
        sscanf(value, "%d.%d", &device->cc_major, &device->cc_minor);
}

static void set_machine(const char *key, const char *value)
{
    if (!strcmp(key, "driver"))
        set_text(machine.driver, sizeof machine.driver, value);
    else if (!strcmp(key, "cuda"))
        machine.cuda = atoi(value);
    else if (!strcmp(key, "init_error"))
        machine.init_error = atoi(value);
    else if (!strcmp(key, "old"))
        machine.old = atoi(value);
}

static struct device *new_device(unsigned index)
{
    struct device *device = &machine.devices[index];
    memset(device, 0, sizeof *device);
    device->index = device->minor = index;
    snprintf(device->name, TEXT_SIZE, "NVIDIA A100-SXM4-80GB");
    snprintf(device->uuid, TEXT_SIZE, "GPU-fa4e0000-0000-0000-0000-%012u", index);
    snprintf(device->bus, sizeof device->bus, "00000000:%02X:00.0", index + 1);
    device->memory_mib = 81920;
    device->temperature = 35;
    device->power_mw = 50000;
    device->power_limit_mw = 400000;
    device->cc_major = 8;
    return device;
}

static void read_ini(FILE *file)
{
    char line[LINE_MAX_BYTES];
    struct device *device = NULL;
    unsigned index;

    memset(&machine, 0, sizeof machine);
    set_text(machine.driver, sizeof machine.driver, "550.90.07");
    machine.cuda = 12040;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (line[0] == '[') {
            device = NULL;
            if (sscanf(line, "[gpu%u]", &index) == 1 && index < DEVICES_MAX) {
                device = new_device(index);
                if (index >= machine.count)
                    machine.count = index + 1;
            }
            continue;
        }
        char *value = strchr(line, '=');
        if (line[0] == '#' || value == NULL)
            continue;
        *value++ = '\0';
        if (device != NULL)
            set_device(device, line, value);
        else
            set_machine(line, value);
    }
}

/* Bring `machine` up to date; the lock is held. */
static void refresh(void)
{
    const char *path = getenv("FAKE_NVML_CONF");
    struct stat status;

    if (path == NULL || stat(path, &status) != 0) {
        memset(&machine, 0, sizeof machine);
        read_path[0] = '\0';
        machine.init_error = DRIVER_NOT_LOADED;
        return;
    }
    if (!strcmp(path, read_path) && status.st_ino == read_status.st_ino && status.st_size == read_status.st_size &&
        !memcmp(&status.st_mtim, &read_status.st_mtim, sizeof status.st_mtim))
        return;
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return;
    read_ini(file);
    fclose(file);
    set_text(read_path, sizeof read_path, path);
    read_status = status;
}

/* ---- the library ------------------------------------------------------------------------------------------- */

/* Return what every system call returns first. */
static int system_state(void)
{
    pthread_mutex_lock(&lock);
    refresh();
    int state = machine.init_error ? machine.init_error : initialized ? SUCCESS : UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    return state;
}

/* Copy the device of a handle as it is now; return what every call with it returns first. */
static int device_state(const struct device *handle, const char *key, struct device *copy)
{
    int state = system_state();
    if (state != SUCCESS)
        return state;
    if (handle < machine.devices || handle >= machine.devices + DEVICES_MAX)
        return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    *copy = *handle;
    pthread_mutex_unlock(&lock);
    if (copy->index >= machine.count)
        return GPU_IS_LOST;
    if (copy->error)
        return copy->error;
    char listed[300], wanted[80];
    snprintf(listed, sizeof listed, ",%s,", copy->unsupported);
    snprintf(wanted, sizeof wanted, ",%s,", key);
    return strstr(listed, wanted) ? NOT_SUPPORTED : SUCCESS;
}

#define DEVICE(key) \
    struct device device; \
    int state = device_state(handle, key, &device); \
    if (state != SUCCESS) \
        return state

static int copy_text(char *out, unsigned size, const char *text)
{
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

EXPORT nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    refresh();
    int state = machine.init_error;
    if (state == SUCCESS)
        initialized++;
    pthread_mutex_unlock(&lock);
    return state;
}

EXPORT nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    int state = initialized ? SUCCESS : UNINITIALIZED;
    initialized -= initialized > 0;
    pthread_mutex_unlock(&lock);
    return state;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires reset";
    case VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch.";
    default: return "Unknown Error";
    }
}

EXPORT nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    int state = system_state();
    return state == SUCCESS ? copy_text(out, size, machine.driver) : state;
}

EXPORT nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    int state = system_state();
    *out = machine.cuda;
    return state;
}

EXPORT nvmlDeviceGetCount_v2(unsigned *out)
{
    int state = system_state();
    *out = machine.count;
    return state;
}

EXPORT nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
    int state = system_state();
    if (state != SUCCESS)
        return state;
    if (index >= machine.count)
        return INVALID_ARGUMENT;
    *out = &machine.devices[index];
    return (*out)->handle_error;
}

EXPORT nvmlDeviceGetUUID(struct device *handle, char *out, unsigned size)
{
    DEVICE("uuid");
    return copy_text(out, size, device.uuid);
}

EXPORT nvmlDeviceGetName(struct device *handle, char *out, unsigned size)
{
    DEVICE("name");
    return copy_text(out, size, device.name);
}

EXPORT nvmlDeviceGetMinorNumber(struct device *handle, unsigned *out)
{
    DEVICE("minor");
    *out = device.minor;
    return SUCCESS;
}

struct memory_v1 {
    u64 total, free, used;
};
struct memory_v2 {
    unsigned version;
    u64 total, reserved, free, used;
};

static int memory_of(struct device *handle, struct device *out)
{
    const struct timespec millisecond = {0, 1000000};
    int state;
    while ((state = device_state(handle, "memory", out)) == SUCCESS && out->hang)
        nanosleep(&millisecond, NULL);
    return state;
}

EXPORT nvmlDeviceGetMemoryInfo_v2(struct device *handle, struct memory_v2 *out)
{
    struct device device;
    int state = machine.old ? FUNCTION_NOT_FOUND : memory_of(handle, &device);
    if (state != SUCCESS)
        return state;
    out->total = device.memory_mib * MIB;
    out->reserved = device.reserved_mib * MIB;
    out->used = device.used_mib * MIB;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

EXPORT nvmlDeviceGetMemoryInfo(struct device *handle, struct memory_v1 *out)
{
    struct device device;
    int state = memory_of(handle, &device);
    if (state != SUCCESS)
        return state;
    out->total = device.memory_mib * MIB;
    out->used = (device.used_mib + device.reserved_mib) * MIB; /* the first version counts both as used */
    out->free = out->total - out->used;
    return SUCCESS;
}

EXPORT nvmlDeviceGetUtilizationRates(struct device *handle, unsigned out[2])
{
    DEVICE("utilisation");
    out[0] = device.utilisation;
    out[1] = 0;
    return SUCCESS;
}

EXPORT nvmlDeviceGetTemperature(struct device *handle, int sensor, unsigned *out)
{
    (void)sensor;
    DEVICE("temperature");
    *out = device.temperature;
    return SUCCESS;
}

EXPORT nvmlDeviceGetPowerUsage(struct device *handle, unsigned *out)
{
    DEVICE("power");
    *out = device.power_mw;
    return SUCCESS;
}

EXPORT nvmlDeviceGetEnforcedPowerLimit(struct device *handle, unsigned *out)
{
    DEVICE("power_limit");
    *out = device.power_limit_mw;
    return SUCCESS;
}

EXPORT nvmlDeviceGetCudaComputeCapability(struct device *handle, int *major, int *minor)
{
    DEVICE("cc");
    *major = device.cc_major;
    *minor = device.cc_minor;
    return SUCCESS;
}

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

EXPORT nvmlDeviceGetPciInfo_v3(struct device *handle, struct pci_info *out)
{
    DEVICE("pci");
    memset(out, 0, sizeof *out);
    set_text(out->id, sizeof out->id, device.bus);
    return SUCCESS;
}

struct process_info {
    unsigned pid;
    u64 memory;
    unsigned gpu_instance, compute_instance;
};

static int list_processes(const struct process_list *list, unsigned *count, struct process_info *out)
{
    unsigned room = *count;
    *count = list->count;
    if (room < list->count)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < list->count; i++)
        out[i] = (struct process_info){list->pids[i], 0, 0xFFFFFFFF, 0xFFFFFFFF};
    return SUCCESS;
}

EXPORT nvmlDeviceGetComputeRunningProcesses_v3(struct device *handle, unsigned *count, struct process_info *out)
{
    DEVICE("compute");
    return list_processes(&device.compute, count, out);
}

EXPORT nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *handle, unsigned *count, struct process_info *out)
{
    DEVICE("graphics");
    return list_processes(&device.graphics, count, out);
}

EXPORT nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *handle, unsigned *count, struct process_info *out)
{
    DEVICE("mps");
    return list_processes(&device.mps, count, out);
}

EXPORT nvmlDeviceGetMigMode(struct device *handle, unsigned *current, unsigned *pending)
{
    DEVICE("mig");
    *current = *pending = device.mig;
    return SUCCESS;
}

EXPORT nvmlDeviceGetComputeMode(struct device *handle, unsigned *out)
{
    DEVICE("compute_mode");
    *out = device.compute_mode;
    return SUCCESS;
}

EXPORT nvmlDeviceGetTotalEccErrors(struct device *handle, int kind, int counter, u64 *out)
{
    (void)counter;
    DEVICE("ecc");
    *out = kind == 1 ? device.ecc_errors : 0; /* 1: uncorrected */
    return SUCCESS;
}

EXPORT nvmlDeviceGetRemappedRows(
    struct device *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    DEVICE("rows");
    *corrected = *uncorrected = 0;
    *pending = device.rows_pending;
    *failed = device.rows_failed;
    return SUCCESS;
}
