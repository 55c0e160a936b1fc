/* Notes every aligned allocation and every free of a process while it is asked to.
 *
 * Preloaded before the C library, whose own functions do the work. PyTorch takes the memory of CPU
 * tensors by posix_memalign, from whichever thread runs the op.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *pointer);

struct event {
    uint64_t address;
    int64_t bytes;  /* -1 for a free */
    int64_t thread;
};

static struct event *events;
static size_t room;
static atomic_size_t used;
static atomic_int on;
static __thread int64_t own_thread;

void watch_start(struct event *into, size_t count) {
    events = into;
    room = count;
    atomic_store(&used, 0);
    atomic_store(&on, 1);
}

/* The number of events, which may be more than there is room for. */
size_t watch_stop(void) {
    atomic_store(&on, 0);
    return atomic_load(&used);
}

static void note(void *pointer, int64_t bytes) {
    size_t at = atomic_fetch_add(&used, 1);
    if (at >= room) return;
    if (!own_thread) own_thread = syscall(SYS_gettid);
    events[at] = (struct event){(uint64_t)pointer, bytes, own_thread};
}

int posix_memalign(void **pointer, size_t alignment, size_t size) {
    void *found = __libc_memalign(alignment, size);
    if (!found) return ENOMEM;
    *pointer = found;
    if (atomic_load_explicit(&on, memory_order_relaxed)) note(found, (int64_t)size);
    return 0;
}

void free(void *pointer) {
    /* Noted before: after it, another thread may get the same address. */
    if (pointer && atomic_load_explicit(&on, memory_order_relaxed)) note(pointer, -1);
    __libc_free(pointer);
}
