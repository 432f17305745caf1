/* Mounts of a sandbox, as made by the spawner: all by descriptor, all idmapped to the sandbox's user namespace. */
#ifndef BARCHAN_MOUNTS_H
#define BARCHAN_MOUNTS_H
#include <linux/mount.h>
#include <stddef.h>
#include <stdint.h>

#include "spawn.h"

/* Places in the spawner's own, otherwise empty, root. */
#define LEAN_ROOT "/root"      /* where a child attaches its new root */
#define LEAN_DEV "/dev"        /* device tree, cloned per sandbox */
#define LEAN_STAGE "/stage"    /* where a child prepares proc, sys and dev */
#define LEAN_MASK_DIR "/mask/d" /* covers directories */
#define LEAN_MASK_FILE "/mask/f" /* covers files */

/* What went wrong: errno, the step's name, the kernel's words. */
struct fault {
    int error;
    char step[SPAWN_STEP];
    char log[SPAWN_LOG];
};

/* Keeps the first fault only; returns -1, so that `return fault_at(f, "step");` reads well. Takes errno. */
int fault_at(struct fault *fault, const char *step);

int sys_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *data);
int sys_unmount(const char *target);
int sys_attach(int mount, const char *target);
int sys_move(const char *from, const char *to);
int sys_clone_tree(const char *path);

/* Leaves the calling process in a new mount namespace that holds nothing but /proc, /sys and the trees above.
 * -1 with the fault set. */
int lean_namespace(struct fault *fault);

struct overlay_plan {
    const int *layers; /* detached mounts, top first; become idmapped */
    uint32_t layer_count;
    int writable; /* detached mount with directories u and w; becomes idmapped */
    int userns;
    uint32_t flags; /* SPAWN_SETUID, SPAWN_VOLATILE, SPAWN_REDUCED */
    uint32_t root_uid; /* host id of the sandbox's root */
};

/* Each returns a detached mount, or -1 with the fault set. */
int overlay_make(const struct overlay_plan *plan, struct fault *fault);
int dev_make(int userns, struct fault *fault);
int shm_make(uint64_t bytes, int userns, struct fault *fault);
int sysfs_make(struct fault *fault);
#endif
