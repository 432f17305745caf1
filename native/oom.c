#include "oom.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int wanted = INT_MIN;

static int score_of(int fd) {
    char text[16];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    if (n <= 0)
        return INT_MAX;
    text[n] = 0;
    return atoi(text);
}

void oom_init(void) {
    const char *given = getenv("OOM_SCORE_ADJ");
    int fd = given ? open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    if (score_of(fd) < atoi(given))
        wanted = atoi(given);
    close(fd);
}

/* Not in the child before its exec: it is not dumpable there, and may not write to its own file. What cannot be written to
 * is left: it has the guest's own score, and more memory. */
void oom_expose(int pid) {
    char path[48], text[16];
    if (wanted == INT_MIN)
        return;
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
    int fd = open(path, O_RDWR | O_CLOEXEC), size = snprintf(text, sizeof text, "%d", wanted);
    ssize_t written = fd >= 0 && score_of(fd) < wanted ? pwrite(fd, text, (size_t)size, 0) : 0;
    (void)written;
    if (fd >= 0)
        close(fd);
}
