/* A libnvidia-ml.so.1 that says what its environment tells it; read at every call.
 *
 *   NVML_STUB_FAIL_INIT=9         code that nvmlInitWithFlags returns
 *   NVML_STUB_COUNT=2             GPUs that are counted (1)
 *   NVML_STUB_HANDLES=1           GPUs whose handle can be had (as counted)
 *   NVML_STUB_UTIL=10,95,0        per cent, one a call, from the front again at the end (50)
 *   NVML_STUB_SM=25,nan           likewise, for the GPM counter (50)
 *   NVML_STUB_NO_GPM=1            the chip has no GPM counters
 *   NVML_STUB_FAIL_<FIELD>=3      code that every call of UTIL, MEMORY, POWER, ENERGY, GPM or METRIC returns
 *   NVML_STUB_FAIL_<FIELD>=3@1    only the call of that number, from 0, since the last init
 *
 * Power is 250 W. Energy grows by 50 J a call from 1000 J. Memory in use is 3 GiB. With -DOLD_DRIVER the energy
 * counter and all of GPM are missing from the library.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };
enum { UTIL, MEMORY, POWER, ENERGY, GPM, METRIC, NUM_FIELDS };
static const char *field_names[NUM_FIELDS] = {"UTIL", "MEMORY", "POWER", "ENERGY", "GPM", "METRIC"};
static int num_calls[NUM_FIELDS];
static int devices[8];
static int num_samples_allocated;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int outcome(int field) {
    char name[64];
    int call = num_calls[field]++;
    snprintf(name, sizeof name, "NVML_STUB_FAIL_%s", field_names[field]);
    const char *text = getenv(name);
    if (!text) return SUCCESS;
    const char *at = strchr(text, '@');
    return !at || atoi(at + 1) == call ? atoi(text) : SUCCESS;
}

static double cycled(const char *name, int call) {
    const char *text = getenv(name);
    if (!text) return 50;
    int length = 1;
    for (const char *c = text; *c; c++) length += *c == ',';
    for (call %= length; call; call--) text = strchr(text, ',') + 1;
    return strtod(text, NULL);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    memset(num_calls, 0, sizeof num_calls);
    return number("NVML_STUB_FAIL_INIT", SUCCESS);
}

/* A leaked GPM sample is an error at the farewell, where tests look for it. */
int nvmlShutdown(void) {
    if (num_samples_allocated) fprintf(stderr, "%d GPM samples leaked\n", num_samples_allocated);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "stub error";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("NVML_STUB_COUNT", 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= number("NVML_STUB_HANDLES", number("NVML_STUB_COUNT", 1))) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    (void)device;
    int call = num_calls[UTIL];
    rates[0] = (unsigned)cycled("NVML_STUB_UTIL", call);
    rates[1] = 77; /* of the memory controller: nobody should ask for it */
    return outcome(UTIL);
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
    (void)device;
    total_free_used[0] = 8ULL << 30;
    total_free_used[1] = 5ULL << 30;
    total_free_used[2] = 3ULL << 30;
    return outcome(MEMORY);
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = 250000;
    return outcome(POWER);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    (void)device;
    *millijoules = 1000000ULL + 50000ULL * num_calls[ENERGY];
    return outcome(ENERGY);
}

struct metric { unsigned id; int code; double value; const char *names[3]; };
struct metrics_get { unsigned version, count; int *earlier, *later; struct metric metrics[1]; };

int nvmlGpmQueryDeviceSupport(void *device, unsigned *version_supported) {
    (void)device;
    version_supported[1] = !number("NVML_STUB_NO_GPM", 0);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(void **sample) {
    num_samples_allocated++;
    *sample = calloc(1, sizeof(int));
    return SUCCESS;
}

int nvmlGpmSampleFree(void *sample) {
    num_samples_allocated--;
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(void *device, int *sample) {
    (void)device;
    int code = outcome(GPM);
    if (code == SUCCESS) *sample = num_calls[GPM];
    return code;
}

/* Metric 2 is the activity of the multiprocessors; the samples must be in the order of time. */
int nvmlGpmMetricsGet(struct metrics_get *request) {
    if (request->version != 1 || request->count != 1 || request->metrics[0].id != 2) return INVALID_ARGUMENT;
    if (*request->earlier == 0 || *request->earlier >= *request->later) return INVALID_ARGUMENT;
    int call = num_calls[METRIC];
    request->metrics[0].code = outcome(METRIC);
    request->metrics[0].value = cycled("NVML_STUB_SM", call);
    return SUCCESS;
}
#endif
