/* Opening what a request names, as any program in the sandbox would, but for the guest's own secrets: magic links and
 * process directories of procfs are refused, and nothing ever blocks. Failures are -1 with errno. */
#ifndef BARCHAN_PATHS_H
#define BARCHAN_PATHS_H
#include <limits.h>
#include <stddef.h>
#include <sys/stat.h>

/* Close-on-exec, without a controlling terminal, without waiting. */
int open_path(int dir, const char *path, int flags, unsigned mode);
/* A regular file, its status in `st`; EISDIR for a directory, EINVAL for anything else. */
int open_regular(const char *path, int flags, unsigned mode, struct stat *st);
/* Directory (O_PATH) that holds the last component of `path`, which is copied to `base`. EISDIR when the path ends in `/`, `.` or `..`. */
int open_parent(const char *path, char base[NAME_MAX + 1]);
/* An existing directory for reading; never through a link when `dir` is a descriptor and `name` one component. */
int open_child_directory(int dir, const char *name);
/* Creates the missing directories above the last component. */
int make_parents(const char *path);
#endif
