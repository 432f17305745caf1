/* Run in a sandbox: reads what it can of every regular file below the given directories and looks for words.
 *
 *   attack_search HEX… -- DIRECTORY…    "found WORD PATH" per hit, then "read FILES refused FILES late FILES"
 *
 * Words are given in hexadecimal, so that the program's own arguments are no hit. Of each file at most LARGEST bytes are
 * read, in at most SECONDS: some of /proc never end. Links are not followed, other mounts are entered, names count as content. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LARGEST (256 << 10)
#define SECONDS 2
#define WORDS 64

static char words[WORDS][256];
static size_t lengths[WORDS];
static int count;
static unsigned files, refused, late;
static char content[LARGEST];

static void ring(int number) { (void)number; }

static int unhex(const char *text, char *word, size_t size) {
    size_t length = 0;
    unsigned byte;
    for (; length < size && sscanf(text, "%2x", &byte) == 1; text += 2)
        word[length++] = (char)byte;
    return (int)length;
}

static void look(const char *bytes, size_t size, const char *path) {
    for (int i = 0; i < count; i++)
        if (memmem(bytes, size, words[i], lengths[i]))
            printf("found %.*s %s\n", (int)lengths[i], words[i], path);
}

static void scan(const char *path) {
    size_t size = 0;
    ssize_t got = 0;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        refused++;
        return;
    }
    alarm(SECONDS);
    while (size < sizeof content && (got = read(fd, content + size, sizeof content - size)) > 0)
        size += (size_t)got;
    late += got < 0 && errno == EINTR;
    alarm(0);
    close(fd);
    files++;
    look(content, size, path);
}

static int visit(const char *path, const struct stat *facts, int kind, struct FTW *at) {
    char target[4096];
    (void)at;
    look(path, strlen(path), path);
    if (kind == FTW_F && S_ISREG(facts->st_mode))
        scan(path);
    if (kind == FTW_SL) {
        ssize_t length = readlink(path, target, sizeof target);
        if (length > 0)
            look(target, (size_t)length, path);
    }
    return 0;
}

int main(int arguments, char **argument) {
    int i = 1;
    struct sigaction action = {.sa_handler = ring};
    sigaction(SIGALRM, &action, NULL); /* without SA_RESTART: it ends a read */
    for (; i < arguments && strcmp(argument[i], "--") && count < WORDS; i++, count++)
        lengths[count] = (size_t)unhex(argument[i], words[count], sizeof *words);
    for (i++; i < arguments; i++)
        nftw(argument[i], visit, 32, FTW_PHYS);
    printf("read %u refused %u late %u\n", files, refused, late);
    return 0;
}
