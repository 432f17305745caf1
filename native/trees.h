/* The writable tree of a container: one btrfs subvolume with the guest's socket `s` and the overlay's directories `u` and `w`. */
#ifndef BARCHAN_TREES_H
#define BARCHAN_TREES_H
#include <stdint.h>

struct tree_directories {
    int trees; /* where the subvolumes are */
    uint64_t no_spare; /* one bit for each name that no spare has */
};

/* An empty subvolume of that name that can grow to so many bytes: a spare one, or new. Its descriptor; -1 with errno, then
 * there may be half of it. */
int tree_make(struct tree_directories *at, const char *name, uint64_t disk_bytes);
int tree_limit(const struct tree_directories *at, const char *name, uint64_t disk_bytes);
/* It is kept as a spare if it was emptied with little work, or deleted. -1 with errno; gone is gone. */
int tree_remove(struct tree_directories *at, const char *name);
#endif
