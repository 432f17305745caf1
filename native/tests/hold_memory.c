/* hold_memory COUNT MIB: puts itself out of the kernel's way when memory runs out, then COUNT children one after another
 * that hold MIB each. Prints how many of them were killed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int lower(void) {
    int fd = open("/proc/self/oom_score_adj", O_RDWR);
    return fd < 0 || write(fd, "0", 1) != 1 || close(fd);
}

static _Noreturn void hold(int ready, size_t size) {
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        _exit(1);
    memset(memory, 1, size);
    if (write(ready, "x", 1) == 1)
        pause();
    _exit(0);
}

/* Returns when the child holds its memory or is gone. */
static void start(size_t size) {
    int ends[2];
    char byte;
    if (pipe(ends))
        exit(1);
    if (fork() == 0)
        hold(ends[1], size);
    close(ends[1]);
    if (read(ends[0], &byte, 1) < 0)
        exit(1);
    close(ends[0]);
}

int main(int count, char **arguments) {
    int killed = 0, status;
    if (count != 3)
        return 2;
    printf("lowered %s\n", lower() ? "no" : "yes");
    for (int i = 0; i < atoi(arguments[1]); i++)
        start((size_t)atoi(arguments[2]) << 20);
    while (waitpid(-1, &status, WNOHANG) > 0)
        killed += WIFSIGNALED(status);
    printf("killed %d\n", killed);
    fflush(stdout);
    signal(SIGTERM, SIG_IGN);
    kill(0, SIGTERM);
    return 0;
}
